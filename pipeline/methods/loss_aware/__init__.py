"""Loss-aware compression: ranks, metrics and forms follow the model's loss. docs/methods.md#loss-aware."""
