"""A checkpoint as a model in memory."""
