"""Waves hold every prompt once, in order, and as many as fit."""

from __future__ import annotations

import itertools
import random

from duat_cli.analysis.plan.waves import STATES, state_bytes, waves


def test_a_wave_fits_and_the_next_prompt_would_not() -> None:
    tokens = [random.Random(k).randint(1, 50) for k in range(200)]
    limit = 9 * state_bytes(50, 8, 4)
    sizes = [state_bytes(count, 8, 4) for count in tokens]
    found = waves(sizes, limit)
    assert [number for wave in found for number in wave] == list(range(200))
    for wave, following in itertools.pairwise(found):
        taken = sum(sizes[number] for number in wave)
        assert taken <= limit < taken + sizes[following[0]]


def test_a_prompt_that_alone_is_too_large_goes_alone() -> None:
    assert waves([5, 90, 5], limit=1) == [range(1), range(1, 2), range(2, 3)]
    assert waves([], 1) == [range(0)]


def test_states_and_a_mask() -> None:
    assert state_bytes(3, 10, 2) == 2 * (3 * 10 * STATES + 3 * 3)
