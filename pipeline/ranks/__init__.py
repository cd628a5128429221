"""How much to keep: importance (IPRS), uniform and progressive ratios, and the exact budget."""
