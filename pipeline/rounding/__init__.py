"""Fewer bits for what is stored: which matrices of a solution, by which moments, and how a checkpoint says so."""
