"""Stored bits as float32: small floats by tables, integers of a few bits unpacked from words of 32 bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# the numpy dtype that holds the bits of each of safetensors' dtypes; little-endian, as in the format; bfloat16 is the
# upper half of a float32, a complex number two float32
RAW = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "C64": "<f4", "F8_E8M0": "u1",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1",
}  # fmt: skip

# sign, two bits of exponent, one of mantissa: OCP Microscaling Formats 1.0, table 5
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# (bits of the mantissa, bias of the exponent) of eight bits: OCP 8-bit Floating Point 1.0; arXiv:2206.02915
_FP8 = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15), "F8_E4M3FNUZ": (3, 8), "F8_E5M2FNUZ": (2, 16)}
LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0, "F8_E4M3FNUZ": 240.0, "F8_E5M2FNUZ": 57344.0, "I8": 128.0, "FP4": 6.0}
"""Magnitude of the largest value of a dtype of few bits."""


def floats(raw: NDArray[Any], dtype: str) -> Floats:
    """Stored numbers as float32; float64 and integers beyond 24 bits are rounded to the nearest."""
    if dtype in _FP8:
        return _fp8(dtype)[raw]
    if dtype == "F8_E8M0":
        return power_of_two(raw)
    if dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def scales_of(raw: NDArray[Any], dtype: str) -> Floats:
    """Stored scales as float32. Bytes (U8) are powers of two (E8M0), for which safetensors had no name at first."""
    return power_of_two(raw) if dtype == "U8" else floats(raw, dtype)


def power_of_two(exponents: NDArray[np.uint8]) -> Floats:
    """Values of E8M0 codes: 2^(e - 127), and NaN for 255; OCP Microscaling Formats 1.0, section 5.4.1."""
    found = np.ldexp(np.float32(1), np.minimum(exponents, 254).astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32("nan"), found)


def fp4(packed: NDArray[np.uint8]) -> Floats:
    """Four-bit floats: (…, n) bytes of two numbers -> (…, 2 n), the lower half of a byte first."""
    return by_pairs(_FP4_PAIRS, packed)


def unpack(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpacks (words, n) of 32 bits to (count, n) integers, each `bits` wide (at most 8), the lowest bits first. An
    integer may lie across two words."""
    held = words.view(np.uint32)
    at = np.arange(count) * bits
    word, shift = at // 32, (at % 32).astype(np.uint32)[:, None]
    found = held[word] >> shift
    if 32 % bits:
        following = held[np.minimum(word + 1, len(held) - 1)]
        found |= np.where(shift + np.uint32(bits) > 32, following << ((np.uint32(32) - shift) % np.uint32(32)), 0)
    return (found & np.uint32((1 << bits) - 1)).astype(np.uint8)


def words_of(count: int, bits: int) -> int:
    """Number of 32-bit words that hold `count` numbers."""
    return -(-count * bits // 32)


@functools.cache
def _fp8(dtype: str) -> Floats:
    """The value of each of the 256 codes."""
    mantissa, bias = _FP8[dtype]
    codes = np.arange(256)
    exponent, fraction = codes >> mantissa & (1 << 7 - mantissa) - 1, codes & (1 << mantissa) - 1
    normal = np.ldexp(1 + fraction / (1 << mantissa), exponent - bias)
    values = np.where(exponent == 0, np.ldexp(fraction / (1 << mantissa), 1 - bias), normal)
    values = np.where(codes >> 7 == 1, -values, values)
    if dtype.endswith("FNUZ"):
        values[0x80] = np.nan
    elif dtype == "F8_E4M3":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[exponent == 31] = np.nan
        values[[0x7C, 0xFC]] = [np.inf, -np.inf]
    return values.astype(np.float32)


def pairs_of(table: Floats, *, lower_first: bool) -> NDArray[np.uint64]:
    """The two numbers of each byte, (256,), as one bit pattern, from a table of sixteen numbers."""
    lower, upper = table[np.arange(256) & 15], table[np.arange(256) >> 4]
    halves = (lower, upper) if lower_first else (upper, lower)
    return np.stack(halves, axis=1).astype(np.float32).view(np.uint64)[:, 0]


def by_pairs(pairs: NDArray[np.uint64], packed: NDArray[Any]) -> Floats:
    """Looks up (…, n) bytes in such a table: (…, 2 n) numbers."""
    return pairs[packed.view(np.uint8)].view(np.float32)


_FP4_PAIRS = pairs_of(np.array(_FP4, np.float32), lower_first=True)
