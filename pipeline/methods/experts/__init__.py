"""Experts of a mixture: which stay, how wide, and how those that stay take over the work of the others."""
