"""Intervals, ranks and divergences."""
