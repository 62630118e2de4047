"""Standard streams, signals, progress, and where results go."""
