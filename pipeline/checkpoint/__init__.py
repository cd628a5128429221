"""OUTPUT: put together from the committed layers, described, and read back."""
