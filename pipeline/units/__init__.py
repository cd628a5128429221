"""The units of work: messages between the driver and the workers."""
