"""Whether an OUTPUT is what its compression record and its source say."""
