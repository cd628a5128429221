"""Rounding of stored matrices to fewer bits: the choice of matrices and bits, and the checkpoint's schemes."""
