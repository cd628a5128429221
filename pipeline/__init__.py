"""What is computed, in which order: kernels, ranks, families, methods, and the commands that put them together."""
