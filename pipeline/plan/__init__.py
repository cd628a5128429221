"""What a job would cost, before it runs: bytes, operations, seconds."""
