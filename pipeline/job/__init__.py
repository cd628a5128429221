"""What the commands share: the parts of a job put together. Only the commands import it."""
