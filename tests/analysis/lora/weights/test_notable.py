"""Kinds of parameters, and sentences on a change: each where the numbers support it, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import sample_reports

from duat_cli.analysis.lora.weights.kinds import compared_kinds, kinds_of
from duat_cli.analysis.lora.weights.notable import summarise
from duat_cli.results.weight_change import Comparison, ModuleChange, ModuleComparison, Rounding


def change(**other: Any) -> ModuleChange:
    """Of a checkpoint, 576 x 576, 7 singular values above the floor, 90 % of it in 4; or as told."""
    return sample_reports.module_change(0, full=True).model_copy(update=other)


def above(rank: int | None) -> Rounding:
    reasons = {"rank_above_floor": "16 at least"} if rank is None else {}
    return Rounding(dtype="bfloat16", floor=0.01, rank_above_floor=rank, reasons=reasons)


def sentence(modules: Sequence[ModuleChange], word: str) -> list[str]:
    return [line for line in summarise(modules, kinds_of(modules), 1.0, 1.0, None).notable if word in line]


def said(modules: Sequence[ModuleChange]) -> list[str]:
    return sentence(modules, "merged low-rank adapter")


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


def lora(name: str, norm: float = 1.0, weight: float = 10.0, **other: Any) -> ModuleChange:
    """Of rank 8, with 90 % in 4 directions, a norm of the change and one of its base weight."""
    change = sample_reports.module_change(0)
    given = {"name": name, "frobenius_norm": norm, "relative_frobenius": norm / weight}
    return change.model_copy(update=given | other)


def test_a_kind_is_the_whole_of_its_matrices_and_no_mean_of_ratios() -> None:
    small, large = lora("m.layers.0.mlp.up", 3.0, 4.0), lora("m.layers.1.mlp.up", 4.0, 40.0)
    kind, other = kinds_of([small, large, lora("head", 5.0, 5.0, numerical_rank=9)])
    assert (kind.name, kind.parameters, kind.blocks, kind.most_in) == ("mlp.up", 2, [0, 1], 0)
    assert kind.relative == pytest.approx(5.0 / (16.0 + 1600.0) ** 0.5)
    assert (kind.relative_least, kind.relative_most) == (0.1, 0.75)
    assert kind.share == other.share == 0.5
    assert (kind.rank_limit, kind.energy_rank_90_most, kind.with_intruders) == (8, 4, 2)
    assert other.rank_limit is None  # nine directions: more than a product of its factors has
    assert other.reasons["most_in"] == "outside of blocks"
    assert "rank_limit" in other.reasons


def test_a_kind_has_no_number_that_one_of_its_parameters_lacks() -> None:
    absent = dict.fromkeys(("frobenius_norm", "relative_frobenius", "energy_rank_90", "intruders"))
    reasons = dict.fromkeys(absent, "NaN")
    kind, other = kinds_of([lora("l.0.a"), lora("l.1.a", reasons=reasons, **absent), lora("l.0.b")])
    for name in ("share", "relative", "relative_least", "relative_most", "most_in"):
        assert getattr(kind, name) is None
        assert kind.reasons[name]
    assert kind.reasons["relative"] == kind.reasons["energy_rank_90_most"] == kind.reasons["with_intruders"] == "NaN"
    assert (other.share, other.relative) == (None, 0.1)


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        (([4, 2], [4, 2]), ["mlp.experts.*.w1"]),
        (([4, 2], [2, 4]), ["mlp.experts.0.w1", "mlp.experts.3.w1"]),
    ],
)
def test_numbers_within_a_block_are_one_kind_where_they_tell_no_shapes_apart(
    shapes: Sequence[list[int]], names: list[str]
) -> None:
    found = [
        lora(f"model.layers.{block}.mlp.experts.{expert}.w1", shape=shape)
        for block in (0, 1)
        for expert, shape in zip((0, 3), shapes, strict=True)
    ]
    assert [kind.name for kind in kinds_of(found)] == names


def test_stacks_are_kinds_of_their_own_and_so_are_biases() -> None:
    found = [lora("enc.block.0.layer.0.q"), lora("dec.block.0.layer.0.q"), lora("dec.block.1.q", parameter="bias")]
    assert [kind.name for kind in kinds_of(found)] == [
        "enc.block.*.layer.0.q",
        "dec.block.*.layer.0.q",
        "dec.block.*.q.bias",
    ]


def test_the_rank_of_a_stack_of_experts_is_that_of_all_experts() -> None:
    stack = lora("l.0.mlp.experts", parameter="up", kind="expert lora", shape=[4, 9, 9], numerical_rank=32)
    assert kinds_of([stack])[0].rank_limit == 32
    assert kinds_of([stack.model_copy(update={"kind": "dora"})])[0].rank_limit is None


def test_the_blocks_with_half_of_the_change_are_named() -> None:
    uneven = [lora(f"l.{block}.q", norm) for block, norm in enumerate((1.0, 1.0, 1.0, 2.0, 3.0))]  # of 16: 9 in block 4
    assert sentence(uneven, "half") == [
        "at least half of the change of blocks 0-4 lies in block 4; block 4 has most, 56.2 %"
    ]
    assert sentence([lora(f"l.{block}.q") for block in (2, 3, 4, 5)], "evenly") == [
        "blocks 2-5 share their change evenly, 25 to 25 % each"
    ]
    assert not sentence(uneven[:2], "blocks")


def test_roles_are_told_by_known_names_alone() -> None:
    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mixer.in_proj")
    known = [lora(f"m.layers.0.{name}", norm) for name, norm in zip(names, (2.0, 1.0, 1.0, 1.0), strict=True)]
    assert sentence(known, "names") == [
        "of the blocks' change (sum of |dW|^2), by the names: queries and keys (which tokens attention reads) 57.1 %, "
        "values and outputs (what it carries) 14.3 %, FFNs 14.3 %, others 14.3 %"
    ]
    assert not sentence([lora(f"h.{block}.attn.c_attn") for block in range(4)], "names")


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        ((4, 2), "2 to 4 of the 8 directions that its rank allows: a rank of 4 would hold as much"),
        ((5, 2), "2 to 5 of the 8 directions that its rank allows"),
    ],
)
def test_whether_the_rank_is_used(needed: tuple[int, int], said: str) -> None:
    found = [lora(f"l.{block}.q", energy_rank_90=count) for block, count in enumerate(needed)]
    assert sentence(found, "directions that") == [f"90 % of the energy (sum of sigma^2) of each change lies in {said}"]
    assert not sentence([one.model_copy(update={"kind": "dora"}) for one in found], "directions that")


def test_two_changes_of_a_kind_are_compared_as_two_vectors() -> None:
    sides = [lora("l.0.q", 3.0), lora("l.1.q", 4.0)]  # the same in block 0, nothing in common in block 1
    pairs = [
        ModuleComparison(
            name=one.name,
            parameter="weight",
            cosine=cosine,
            distance=distance,
            relative_distance=None,
            output_cosines=None,
            input_cosines=None,
        )
        for one, cosine, distance in zip(sides, (1.0, 0.0), (0.0, 32**0.5), strict=True)
    ]
    both = Comparison(
        other="other", modules=pairs, only_first=[], only_second=[], cosine=0.36, agreeing=[], opposing=[]
    )
    [kind] = compared_kinds(both, sides, sides)
    assert (kind.name, kind.parameters, kind.cosine_least, kind.cosine_most) == ("q", 2, 0.0, 1.0)
    assert kind.cosine == pytest.approx(9 / 25)
    assert kind.relative_distance == pytest.approx(32**0.5 / 10)
    assert compared_kinds(both, [*sides, sides[0]], sides) == []
