"""Integers of few bits in words of 32 bits, with a scale and a zero point for each group of inputs.

    W[o, i] = (Q[o, i] - Z[o, g(i)]) S[o, g(i)]

GPTQ, AWQ and compressed-tensors' pack-quantized differ in how the integers are placed in the words.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duat_cli.loading.quantised.formula import Arrays, Formula, UnfitError
from duat_cli.loading.quantised.numbers import Floats, floats, unpack

Codes = NDArray[np.uint8]
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: the number, of eight neighbours, at each place of a word
_TO_PLACE = np.argsort(_ORDER)


@dataclass(frozen=True, kw_only=True)
class Grouped(Formula):
    """Integers with groups of inputs. Roles: values, scales; zeros where they are stored; groups where inputs are not
    in order."""

    bits: int

    def rows(self, arrays: Arrays, start: int, stop: int) -> Floats:
        scales, zeros = self._scales(arrays, start, stop), self._zeros(arrays, start, stop)
        values = self._values(arrays, start, stop)
        if "groups" not in arrays:
            blocks = values.reshape(len(values), scales.shape[1], -1)
            blocks -= zeros[..., None]
            blocks *= scales[..., None]
            return values
        groups = arrays["groups"]
        count, last = scales.shape[1], groups.max()
        if groups.min() < 0 or last >= count or (last == 0 and count > 1):  # all 0: readers compute different weights
            raise UnfitError(self.parts["groups"], f"groups {groups.min()} to {last} of {count} that have scales")
        values -= zeros[:, groups] if zeros.shape[1] > 1 else zeros
        values *= scales[:, groups]
        return values

    @abstractmethod
    def _values(self, arrays: Arrays, start: int, stop: int) -> Floats:
        """Values (rows, columns), contiguous."""

    @abstractmethod
    def _zeros(self, arrays: Arrays, start: int, stop: int) -> Floats:
        """Zero points (rows, groups), or (rows or 1, 1)."""

    def _scales(self, arrays: Arrays, start: int, stop: int) -> Floats:
        """Scales (rows, groups); stored as (groups, out), except in `Packed`."""
        return floats(arrays["scales"][:, start:stop], self.dtypes["scales"]).T


def _turned(codes: Codes) -> Floats:
    """The transposed codes as float32, contiguous."""
    return np.ascontiguousarray(codes.T).astype(np.float32)


def _words(bits: int, start: int, stop: int) -> slice:
    """The words that hold the numbers from `start` on, a multiple of 32, up to `stop`."""
    return slice(start * bits // 32, -(-stop * bits // 32))


@dataclass(frozen=True, kw_only=True)
class Gptq(Grouped):
    """GPTQ: values (inputs, out) with inputs packed, zeros (groups, out) with outs packed, scales (groups, out)."""

    added: int
    """Number added to stored zero points: 1 in GPTQ's first format, which stores them less one."""

    def _values(self, arrays: Arrays, start: int, stop: int) -> Floats:
        return _turned(unpack(arrays["values"][:, start:stop], self.bits, self.shape[-1]))

    def _zeros(self, arrays: Arrays, start: int, stop: int) -> Floats:
        words = arrays["zeros"].T[_words(self.bits, start, stop)]
        zeros = unpack(words, self.bits, stop - start).astype(np.float32) + self.added
        return np.mod(zeros, np.float32(1 << self.bits))  # a zero point of 0 is stored as the largest number


@dataclass(frozen=True, kw_only=True)
class Awq(Grouped):
    """AWQ: values (inputs, out) and zeros (groups, out) with outs packed, eight a word; scales (groups, out)."""

    def _values(self, arrays: Arrays, start: int, stop: int) -> Floats:
        return self._codes(arrays["values"], start, stop)

    def _zeros(self, arrays: Arrays, start: int, stop: int) -> Floats:
        return self._codes(arrays["zeros"], start, stop)

    def _codes(self, words: NDArray[np.int32], start: int, stop: int) -> Floats:
        found = unpack(words.T[_words(self.bits, start, stop)], self.bits, stop - start)  # (out, inputs)
        return found.reshape(-1, 8, found.shape[1])[:, _TO_PLACE].reshape(found.shape).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Packed(Grouped):
    """pack-quantized: values (out, inputs) with inputs packed, zeros (out, groups) with outs packed, scales (out,
    groups). Numbers are stored plus half their range."""

    def _values(self, arrays: Arrays, start: int, stop: int) -> Floats:
        values = _turned(unpack(arrays["values"][start:stop].T, self.bits, self.shape[-1]))
        values -= self._half
        return values

    def _zeros(self, arrays: Arrays, start: int, stop: int) -> Floats:
        if "zeros" not in arrays:
            return np.zeros((1, 1), np.float32)
        words = arrays["zeros"][_words(self.bits, start, stop)]
        return unpack(words, self.bits, stop - start).astype(np.float32) - self._half

    def _scales(self, arrays: Arrays, start: int, stop: int) -> Floats:
        scales = floats(arrays["scales"], self.dtypes["scales"])
        return scales.reshape(1, 1) if scales.size == 1 else scales.reshape(len(scales), -1)[start:stop]

    @property
    def _half(self) -> np.float32:
        return np.float32(1 << self.bits - 1)
