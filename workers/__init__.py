"""Who computes: one layer on a device, a worker's units, the Ray actors and their pool."""
