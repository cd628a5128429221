"""What a person sees and sends: arguments, signals, progress, the summary."""
