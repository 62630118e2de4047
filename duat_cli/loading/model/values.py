"""The values of a model in memory, piece by piece, as `checkpoint/stream.py` gives those of files."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.stream import LONGEST_ROW, PIECE, Piece, Streamed


def streamed(model: nn.Module, entries: dict[str, TensorEntry]) -> Iterator[Streamed]:
    """Every parameter that is not empty. entries: what headers would say of them."""
    for name, parameter in model.named_parameters():
        if parameter.numel():
            yield Streamed(name, entries[name], _pieces(parameter.detach()))


def _pieces(value: Tensor) -> Iterator[Piece]:
    """All dimensions but the last are rows, a vector is a column; float64 stays what it is."""
    matrix = value.reshape(-1, value.shape[-1] if value.ndim > 1 else 1)
    columns = matrix.shape[1]
    long = columns > LONGEST_ROW
    height = 1 if long else max(1, PIECE // columns)
    kept = torch.float64 if value.dtype == torch.float64 else torch.float32
    for row in range(0, len(matrix), height):
        for start in range(0, columns, LONGEST_ROW):
            part = matrix[row : row + height, start : start + LONGEST_ROW]
            yield Piece(row, part.to("cpu", kept).contiguous().numpy(), not long)
