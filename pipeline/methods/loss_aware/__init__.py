"""Loss-aware compression: ranks, metrics and forms by what the model's loss feels. METHODS §6."""
