"""Rounding of stored matrices to fewer bits: the choice of matrices, the moments, and the checkpoint's schemes."""
