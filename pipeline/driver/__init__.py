"""The loop over layers and the scheduler of units, without I/O and without tensors."""
