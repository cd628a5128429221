"""The arithmetic of `plan`: bytes, memory, disk and seconds of a job."""
