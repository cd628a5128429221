"""Training of a compressed model as a whole against the dense model's stored distribution. docs/methods.md#healing."""
