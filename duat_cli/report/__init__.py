"""Turns results into text. Nothing is computed here."""
