"""Allocation of ranks within a budget: by importance (IPRS), progressive ratios, or predicted loss."""
