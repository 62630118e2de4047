"""Standard streams, signals, progress, and help."""
