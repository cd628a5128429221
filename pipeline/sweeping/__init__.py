"""A sweep: many points from one calibration; what they share, how each is solved and scored, what came of all."""
