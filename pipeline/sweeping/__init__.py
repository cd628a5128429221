"""A sweep: many points from one calibration, which are solved, scored and compared."""
