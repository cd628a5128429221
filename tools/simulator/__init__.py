"""Simulates jobs on clusters that are not available."""
