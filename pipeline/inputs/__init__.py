"""Inputs of a job, read and checked before it starts: sources, calibration text, fingerprint."""
