"""A model larger than memory: its modules without weights, and the weights read block by block."""
