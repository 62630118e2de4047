"""Capture and replay: the one place that patches modules and stands in for functions."""
