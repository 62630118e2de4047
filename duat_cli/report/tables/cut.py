"""Texts of tokens, cut where a long one would fill the line."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

TOKEN = 16  # cells of a token in a table
TARGET = 40  # of one in a sentence


def cut(text: str, cells: int = TOKEN) -> str:
    """The text, of at most so many cells."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 2) + ".."
