"""What is computed, in which order. `python -m pipeline.run MANIFEST` is the job."""
