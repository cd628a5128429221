"""Sweeps: many points from one calibration are solved, scored and compared."""
