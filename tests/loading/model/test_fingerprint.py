"""The content hash: any change of a name, shape, dtype or byte is seen, and nothing else is."""

from __future__ import annotations

import hashlib

import pytest
import torch

from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.model.fingerprint import fingerprint, row_sums

ROW = 8192  # words that go into one sum


def module(**tensors: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return made


def test_a_fingerprint_is_of_names_shapes_dtypes_and_bytes() -> None:
    base = torch.arange(6.0)
    prints = [
        fingerprint(module(a=base)),
        fingerprint(module(b=base)),
        fingerprint(module(a=base.reshape(2, 3))),
        fingerprint(module(a=base.to(torch.bfloat16))),
        fingerprint(module(a=base.nextafter(base + 1))),
        fingerprint(module(a=base, b=base)),
        fingerprint(module(a=base.view(torch.complex64))),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(module(b=base, a=base + 1)) == fingerprint(module(a=base + 1, b=base))
    strided = torch.stack([base, base], 1)[:, 0]
    assert fingerprint(module(a=strided)) == fingerprint(module(a=base))


def test_tied_parameters_count_once_and_computed_buffers_not_at_all() -> None:
    model = torch.nn.Linear(2, 2)
    plain = fingerprint(model)
    model.register_buffer("computed", torch.ones(2), persistent=False)
    assert fingerprint(model) == plain
    model.register_buffer("saved", torch.ones(2))
    with_buffer = fingerprint(model)
    assert with_buffer != plain
    model.register_parameter("weight_again", model.weight)
    assert fingerprint(model) == with_buffer


def test_weights_that_are_not_in_memory() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="'weight' is not in memory"):
        fingerprint(model)


def test_any_changed_bit_is_seen() -> None:
    """In every bit of a word, at both ends of a full row and in the bytes behind the last one."""
    words = torch.randint(-(2**31), 2**31, (2 * ROW + 3,), dtype=torch.int32)
    seen = {fingerprint(module(a=words))}
    for place in (0, ROW - 1, ROW, 2 * ROW, 2 * ROW + 2):
        for bit in range(32):
            changed = words.clone()
            changed[place] ^= torch.tensor(1 << bit).to(torch.int32)
            seen.add(fingerprint(module(a=changed)))
    assert len(seen) == 1 + 5 * 32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_changes_that_cancel_in_a_plain_sum_are_seen(dtype: torch.dtype) -> None:
    """Signs turned, values exchanged, everything negated or moved by one."""
    values = torch.randn(4 * ROW).to(torch.float32)
    two = values.clone()
    two[[0, 1]] = values[[1, 0]]
    signs = values.clone()
    signs[:2] *= -1
    kinds = (values, two, signs, -values, values.roll(1), values.flip(0), values.view(2, -1).flip(0).flatten())
    assert len({fingerprint(module(a=kind.to(dtype).reshape(-1))) for kind in kinds}) == len(kinds)


def test_the_sum_of_a_row_is_the_formula() -> None:
    raw = hashlib.shake_256(b"duat fingerprint").digest(8 * ROW)
    keys = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") | 1 for i in range(ROW)]
    row = torch.randint(-(2**31), 2**31, (ROW,), dtype=torch.int32)
    expected = sum(k * w for k, w in zip(keys, row.tolist(), strict=True)) % 2**64
    assert int(row_sums(row[None])) % 2**64 == expected


def test_weights_that_are_views_hash_as_their_copies() -> None:
    """A slice may begin in the middle of a word, or go through memory in another order."""
    base = torch.randn(300, 301).to(torch.bfloat16)
    for view in (base.flatten()[1:], base.T, base[:, ::2], base[0, 0], base[:0]):
        assert fingerprint(module(a=view)) == fingerprint(module(a=view.clone(memory_format=torch.contiguous_format)))


def test_the_fingerprint_stays_what_it_is() -> None:
    """It names the files of the cache, and stands in reports that are compared later."""
    known = fingerprint(module(a=torch.arange(20_000.0), b=torch.ones(3, dtype=torch.bfloat16)))
    assert known == "61b9a40fb788f957dc6903ae726dc030a54fe5459aa185a07f237bc233e386d6"
