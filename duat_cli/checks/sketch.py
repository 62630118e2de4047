"""Sketches: eight numbers of a tensor, from which the norm of any later change of it can be estimated.

    s_k = sum_ij u_ik w_{i+j} v_jk W_ij,    k = 1..8,    u, v, w = +-1 from SHAKE-256

Sketches are linear, so the mean of (s_k - s'_k)^2 estimates |W - W'|_F^2. It has no bias, and its standard error is
at most half of |W - W'|_F^2 for a change of any rank: within one k any four entries have independent signs, so s_k^2
has at most twice its squared mean as variance, and s_k^2 and s_l^2 are uncorrelated. (u and v cancel at the corners of
a rectangle; w does not, because the smallest i + j of the four occurs once. Thorup & Zhang, Tabulation based
4-universal hashing, 2004.) The standard error of |W - W'|_F is about a quarter of it, and 0.3 of it where only four
such corners changed.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

SIZE = 8  # numbers of a sketch
_CHUNK = 1 << 16  # signs made at once
_ONE_THREAD = 1 << 15  # values; for more BLAS starts threads, which wait for each other on a busy machine
_SEED = "duat sketch 2"
_FIRST_POOL = 1 << 18
_FIRST_ROW = 1 << 20

Floats = NDArray[np.floating]


class Sketch:
    """The sums s_k of a tensor that comes in pieces; they do not depend on where it is cut."""

    def __init__(self) -> None:
        self.sums = np.zeros(SIZE)

    def products(self, x: Floats, row: int, column: int) -> Floats:  # (rows, SIZE)
        """sum_j w_{i+j} v_jk x_ij of a piece x (rows, columns) whose first entry is W[row, column]."""
        rows, columns = x.shape
        diagonals = _signs("diagonals", row + column, rows + columns - 1)
        w = np.ndarray(x.shape, diagonals.dtype, diagonals, strides=diagonals.strides * 2)
        v, height = _column_signs(column, columns), max(1, _ONE_THREAD // columns)
        products = np.empty((rows, SIZE), x.dtype)
        for start in range(0, rows, height):
            some = slice(start, start + height)
            np.matmul(x[some] * w[some], v, out=products[some])
        return products

    def add(self, products: Floats, row: int) -> None:
        u = _signs("rows", row * SIZE, products.size).reshape(-1, SIZE)
        self.sums += (products * u).astype(np.float64).sum(axis=0)


class FirstSketch:
    """The sums of baselines with schema version 1: s_k = sum_ij u_ik v_j W_ij, with new u and v for every piece.

    All eight share v, so for a change of rank 1 their standard error is up to 0.63 of the norm. They are no longer
    written, only computed to compare a checkpoint with such a baseline.
    """

    def __init__(self) -> None:
        self.sums = np.zeros(SIZE)

    def add(self, x: Floats, piece: int) -> None:
        rows, columns = x.shape
        v = _shake("duat columns", _FIRST_POOL + _FIRST_ROW)[piece * 7919 % _FIRST_POOL :][:columns]
        u = _shake("duat rows", _FIRST_POOL + _FIRST_ROW)[piece * 104_729 % _FIRST_POOL :][: rows * SIZE]
        self.sums += (x @ v).astype(np.float64) @ u.reshape(rows, SIZE)


@functools.lru_cache(maxsize=2)
def _column_signs(column: int, columns: int) -> Floats:  # (columns, SIZE)
    return _signs("columns", column * SIZE, columns * SIZE).reshape(columns, SIZE)


def _signs(name: str, start: int, count: int) -> Floats:
    """The signs start, start + 1, ... of an endless sequence, which is made in chunks as needed."""
    first, last = start // _CHUNK, (start + count - 1) // _CHUNK
    chunks = [_shake(f"{_SEED} {name} {number}", _CHUNK) for number in range(first, last + 1)]
    joined = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    return joined[start - first * _CHUNK :][:count]


@functools.lru_cache(maxsize=64)
def _shake(seed: str, count: int) -> Floats:
    """`count` signs, float32."""
    raw = hashlib.shake_256(seed.encode()).digest(count // 8)
    return np.unpackbits(np.frombuffer(raw, np.uint8)).astype(np.float32) * 2 - 1
