"""Recommends a manifest for a model, a text and machines."""
