"""Weights that are stored in few bits, and the formulas by which their formats define the values."""
