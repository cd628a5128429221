"""The loop over layers and everything that schedules units: no I/O, no tensors."""
