"""Models with changed weights: terms removed, parameters replaced, the architecture re-initialised."""
