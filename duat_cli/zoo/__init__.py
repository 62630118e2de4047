"""Tiny models of every type."""
