"""Every code of every small float against torch; numbers of few bits against a walk over single bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.loading.quantised.numbers import LARGEST, floats, fp4, power_of_two, scales_of, unpack, words_of

SMALL = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
CODES = torch.arange(256).to(torch.uint8)


@pytest.mark.parametrize("name", SMALL)
def test_every_small_float_is_torchs(name: str) -> None:
    theirs = CODES.view(SMALL[name]).float().numpy()
    mine = floats(CODES.numpy(), name)
    assert mine.dtype == np.float32
    np.testing.assert_array_equal(mine, theirs)
    if name in LARGEST:
        assert np.max(mine[np.isfinite(mine)]) == LARGEST[name]


def test_bfloat16_and_float16() -> None:
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        values = torch.arange(1 << 16).to(torch.uint16).view(dtype)
        raw = values.view(torch.uint16).numpy() if name == "BF16" else values.numpy()
        np.testing.assert_array_equal(floats(raw, name), values.float().numpy())


def test_bytes_of_scales_are_powers_of_two() -> None:
    assert list(scales_of(np.array([127, 128, 0], np.uint8), "U8")) == [1.0, 2.0, 2.0**-127]
    assert np.isnan(power_of_two(np.array([255], np.uint8)))[0]
    assert list(scales_of(np.array([3.0], np.float32), "F32")) == [3.0]


def test_two_numbers_a_byte() -> None:
    found = fp4(np.arange(256, dtype=np.uint8).reshape(2, 128))
    assert found.shape == (2, 256)
    for code in range(256):
        for half, bits in enumerate((code & 15, code >> 4)):
            exponent, mantissa = bits >> 1 & 3, bits & 1
            size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            assert found.reshape(-1)[2 * code + half] == (-size if bits >> 3 else size)


@given(st.integers(1, 8), st.integers(1, 70), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whole_numbers_of_few_bits(bits: int, count: int, columns: int, random: object) -> None:
    generator = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    words = generator.integers(-(2**31), 2**31, (words_of(count, bits), columns), dtype=np.int64).astype(np.int32)
    found = unpack(words, bits, count)
    assert found.shape == (count, columns)
    for column in range(columns):
        stream = sum(int(word) % 2**32 << 32 * k for k, word in enumerate(words[:, column]))
        assert list(found[:, column]) == [stream >> bits * k & (1 << bits) - 1 for k in range(count)]
    assert np.array_equal(unpack(np.asfortranarray(words), bits, count), found)
