"""Loss-aware compression: ranks, metrics and forms by what the model's loss feels. docs/methods.md#loss-aware."""
