"""Aligned tokens, against the textbook recursion."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.analysis.compare.alignment import (
    Stretch,
    align,
    align_ends,
    align_inputs,
    align_places,
    common,
    common_end,
)
from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt

IDS = st.lists(st.integers(0, 4), max_size=14)


def longest(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    @functools.cache
    def of(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        return 1 + of(i + 1, j + 1) if a[i] == b[j] else max(of(i + 1, j), of(i, j + 1))

    return of(0, 0)


@given(IDS, IDS)
def test_a_longest_common_subsequence(a: list[int], b: list[int]) -> None:
    pairs = common(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
    assert len(pairs) == longest(tuple(a), tuple(b))


def weightiest(a: tuple[int, ...], b: tuple[int, ...], special: set[int]) -> tuple[int, int]:
    """Most ids that are not special, and most special ones beside them."""

    @functools.cache
    def of(i: int, j: int) -> tuple[int, int]:
        if i == len(a) or j == len(b):
            return 0, 0
        skipped = max(of(i + 1, j), of(i, j + 1))
        ordinary, others = of(i + 1, j + 1)
        here = (ordinary, others + 1) if a[i] in special else (ordinary + 1, others)
        return max(here, skipped) if a[i] == b[j] else skipped

    return of(0, 0)


@given(IDS, IDS)
def test_special_ids_give_way(a: list[int], b: list[int]) -> None:
    special = {0, 3}
    pairs = common(a, b, special)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
    ordinary = sum(a[i] not in special for i, _ in pairs)
    assert (ordinary, len(pairs) - ordinary) == weightiest(tuple(a), tuple(b), special)


@given(IDS.filter(bool), IDS)
def test_runs_and_rests_are_all_tokens(a: list[int], b: list[int]) -> None:
    b = [*b, a[0]]
    found = align(a, b, ("one", "two"))
    assert sum(run.tokens for run in found.stretches()) == len(found.a)
    for run in found.stretches():
        assert a[run.a : run.a + run.tokens] == b[run.b : run.b + run.tokens]
    for places, rest, count in zip((found.a, found.b), found.left_out(), (len(a), len(b)), strict=True):
        assert sorted([*places.tolist(), *rest.tolist()]) == list(range(count))


def test_the_same_prompt_is_one_run() -> None:
    found = align([5, 6, 7], [5, 6, 7], ("one", "two"))
    assert found.stretches() == [Stretch(0, 0, 3)]
    assert [rest.tolist() for rest in found.left_out()] == [[], []]


def test_no_common_token_is_said_with_the_lengths() -> None:
    with pytest.raises(InputError, match=r"one and two: no token .* \(2 and 1 tokens\)"):
        align([1, 2], [3], ("one", "two"))
    with pytest.raises(InputError, match="but special ones"):
        align([0, 2], [0, 3], ("one", "two"), {0})
    assert align([0, 5], [5, 0], ("one", "two"), {0}).stretches() == [Stretch(1, 0, 1)]


def test_place_by_place() -> None:
    found = align_places([5, 6, 7, 8], [5, 1, 2, 8], ("one", "two"))
    assert found.stretches() == [Stretch(0, 0, 1), Stretch(1, 1, 2, same=False), Stretch(3, 3, 1)]
    assert [rest.tolist() for rest in found.left_out()] == [[], []]
    with pytest.raises(InputError, match="one has 2 tokens and two 1"):
        align_places([1, 2], [1], ("one", "two"))
    with pytest.raises(InputError, match=r"^--patch: one has 2 tokens and two 1, .* what is b's"):
        align_places([1, 2], [1], ("one", "two"), patched=True)


def test_ends() -> None:
    assert common_end([[1, 2, 3], [2, 3], [9, 9, 2, 3]]) == 2
    assert common_end([[1], [2]]) == 0
    found = align_ends([1, 2, 3], [2, 3], 2)
    assert (found.a.tolist(), found.b.tolist()) == ([1, 2], [0, 1])


def read(name: str, count: int, **tensors: torch.Tensor) -> Prompt:
    """What a model of pictures reads."""
    return Prompt(name, name, torch.arange(count)[None], 1, prepared={"pixel_values": torch.ones(1, 3), **tensors})


def test_positions_of_pictures_but_for_those_that_a_mask_leaves_out() -> None:
    mask = torch.tensor([[1, 1, 0, 1]])
    every = align_inputs(read("a", 4), read("b", 4))
    assert every.stretches() == [Stretch(0, 0, 4)]
    ones = {"attention_mask": torch.ones(1, 9, dtype=torch.int64)}  # of samples, all of which are read
    assert align_inputs(read("a", 4, **ones), read("b", 4)).stretches() == [Stretch(0, 0, 4)]
    some = align_inputs(read("a", 4, pixel_attention_mask=mask), read("b", 4, pixel_attention_mask=mask))
    assert some.stretches() == [Stretch(0, 0, 2), Stretch(3, 3, 1)]
    assert [places.tolist() for places in some.left_out()] == [[2], [2]]
    with pytest.raises(InputError, match=r"a has 4 positions and b 5, .*: give pictures of one size, sounds of one"):
        align_inputs(read("a", 4), read("b", 5))
    with pytest.raises(InputError, match="a and b: other pixel_attention_mask, so that one place"):
        align_inputs(read("a", 4, pixel_attention_mask=mask), read("b", 4))
