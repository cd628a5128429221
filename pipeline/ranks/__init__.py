"""Ranks for a budget: importance (IPRS), progressive ratios, predicted loss, and exact rounding."""
