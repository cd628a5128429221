"""The interface to a person at a terminal: arguments, signals, progress."""
