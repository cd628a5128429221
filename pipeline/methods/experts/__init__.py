"""Pruning of a mixture's experts: which are kept, at which width, and how they are refitted to the dense output."""
