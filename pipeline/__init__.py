"""Computes the compressed model. `python -m pipeline.run MANIFEST` runs a job."""

PROJECT = "Lamina"
