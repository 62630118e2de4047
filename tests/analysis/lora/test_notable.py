"""That a change looks like a merged adapter is said where it is true of every matrix, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import sample_reports

from duat_cli.analysis.lora.notable import summarise
from duat_cli.results.weight_change import ModuleChange, Rounding


def change(**other: Any) -> ModuleChange:
    """Of a checkpoint, 576 x 576, 7 singular values above the floor, 90 % of it in 4; or as told."""
    return sample_reports.module_change(0, full=True).model_copy(update=other)


def above(rank: int | None) -> Rounding:
    reasons = {"rank_above_floor": "16 at least"} if rank is None else {}
    return Rounding(dtype="bfloat16", floor=0.01, rank_above_floor=rank, reasons=reasons)


def said(modules: Sequence[ModuleChange]) -> list[str]:
    return [line for line in summarise(modules, 1.0, 1.0, None).notable if "merged low-rank adapter" in line]


def test_the_largest_rank_is_named_and_vectors_do_not_count() -> None:
    vector = change(shape=[576], rounding=None, energy_rank_90=None)
    assert said([change(), change(rounding=above(72)), vector]) == [
        "every changed matrix moves, up to rounding, by a change of rank at most 72: a merged low-rank adapter looks "
        "like this"
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"rounding": above(73)},  # more than an eighth of the width
        {"rounding": above(None)},
        {"rounding": None},  # a stack of experts, or NaN
        {"rounding": above(3)},  # the rest is more than a tenth
        {"energy_rank_90": None},  # a large one, of which only the leading singular values are known
        {"rounding": above(0)},  # all of it may be rounding
        {"shape": [576, 48]},
    ],
)
def test_one_matrix_is_enough_to_be_silent(other: dict[str, Any]) -> None:
    assert said([change()])
    assert not said([change(), change(**other)])


def test_no_matrix_no_sentence() -> None:
    assert not said([])
    assert not said([change(shape=[576], rounding=None)])
