"""Repair: layers that are left after a set is removed are refitted by least squares to the dense model's output."""
