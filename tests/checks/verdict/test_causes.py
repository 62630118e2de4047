"""What is a cause, what follows from which, and that no finding is lost."""

from __future__ import annotations

from typing import Any

import pytest
import sample_reports as sample
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.checks.drift import Deviation
from duat_cli.checks.verdict.causes import grouped, origin_of
from duat_cli.results.check import Cause, Outcome

TENSORS = [f"model.layers.{n}.{kind}.weight" for n in range(6) for kind in ("q_proj", "o_proj", "norm")]


def outcome(rule: str, status: str = "failed", **fields: Any) -> Outcome:
    return sample.outcome(rule, status, **{"message": rule, **fields})


def weight(block: int, kind: str = "o_proj", **more: Any) -> Outcome:
    return outcome("drift.weights", block=block, where=f"weights.model.layers.{block}.{kind}.weight", **more)


def number(block: int | None, rule: str = "drift.operator", **more: Any) -> Outcome:
    where = "summary.linear_share" if block is None else f"blocks.{block}.operator.frobenius_norm"
    return outcome(rule, block=block, where=where, **more)


def causes(*outcomes: Outcome, drift: tuple[Deviation, ...] = ()) -> list[Cause]:
    return grouped(outcomes, drift, TENSORS)[1]


def brief(*outcomes: Outcome) -> list[tuple[str, int, int]]:
    return [(c.id, len(c.findings), len(c.effects)) for c in causes(*outcomes)]


def test_numbers_follow_from_the_weights_in_front_of_them() -> None:
    found = [weight(2), number(2), number(5), number(None), outcome("behaviour.loss")]
    assert brief(*found) == [("weights", 1, 4)]


def test_what_moved_in_front_of_the_first_weight_stands_for_itself() -> None:
    """Nothing behind a block can move it; of the rest the weight is the cause."""
    found = [weight(3), number(1), number(2), number(3), number(4)]
    assert brief(*found) == [("weights", 1, 2), ("forward", 1, 1)]
    forward = causes(*found)[1]
    assert (forward.block, forward.message) == (1, "2 numbers of the forward pass moved, first at block 1")


def test_a_field_of_the_config_comes_first() -> None:
    field = outcome("drift.config", where="rope_theta", message="rope_theta 10000 -> 1000000")
    assert brief(number(0), number(4), field) == [("drift.config", 1, 2)]
    assert brief(weight(2), number(0), number(4), field) == [("drift.config", 1, 2), ("weights", 1, 0)]
    # where nothing moved in front of the weights they explain it all, and the field need not
    assert brief(weight(2), number(2), number(4), field) == [("drift.config", 1, 0), ("weights", 1, 2)]


def test_weights_follow_from_a_fault_of_the_files_that_names_them() -> None:
    copy = outcome("integrity.duplicate_blocks", block=4, where="model.layers", message="block 4 is a copy of block 3")
    count = outcome("drift.integrity", where="integrity.duplicate_blocks")
    found = [copy, *(weight(4, kind) for kind in ("q_proj", "o_proj", "norm")), count, number(4), number(5)]
    assert brief(*found) == [("integrity.duplicate_blocks", 1, 6)]
    assert causes(*found)[0].folded == (
        "behind it: 3 tensors moved in block 4; 2 numbers of the forward pass moved; 1 finding of drift.integrity"
    )
    assert brief(*found, weight(1)) == [("integrity.duplicate_blocks", 1, 4), ("weights", 1, 2)]


def test_a_failure_never_follows_from_a_warning() -> None:
    zero = outcome("integrity.constant_heads", status="warned", block=2, where="model.layers.2.o_proj.weight")
    assert brief(zero, weight(2), number(3)) == [("weights", 1, 1), ("integrity.constant_heads", 1, 0)]
    assert brief(weight(2, status="warned"), number(3)) == [("forward", 1, 0), ("weights", 1, 0)]


def test_what_the_model_predicts_follows_from_broken_files_but_not_from_how_they_are_stored() -> None:
    loss = outcome("behaviour.loss")
    assert brief(outcome("integrity.tokenizer", where="tokenizer.json"), loss) == [("integrity.tokenizer", 1, 1)]
    # which id ends a text says nothing of what the model makes of one
    ending = outcome("integrity.tokenizer", where="config.json")
    assert brief(ending, loss) == [("integrity.tokenizer", 1, 0), ("behaviour.loss", 1, 0)]
    harmless = outcome("integrity.tokenizer", status="warned", where="tokenizer.json")
    assert brief(ending, harmless, loss) == [("integrity.tokenizer", 2, 0), ("behaviour.loss", 1, 0)]
    assert brief(outcome("integrity.dtype"), loss) == [("integrity.dtype", 1, 0), ("behaviour.loss", 1, 0)]
    assert brief(loss) == [("behaviour.loss", 1, 0)]


def test_numbers_that_have_no_value_any_more() -> None:
    nan = outcome("integrity.nonfinite", block=1, where="model.layers.1.o_proj.weight")
    gone = outcome("drift.vanished", block=1, where="weights.model.layers.1.o_proj.weight")
    assert brief(nan, gone) == [("integrity.nonfinite", 1, 1)]


def test_the_farthest_effect_is_named() -> None:
    moves = (
        Deviation("blocks.2.operator.frobenius_norm", "beyond", 10.0, 11.0, 1.0, None),
        Deviation("blocks.4.operator.frobenius_norm", "beyond", 1000.0, 1050.0, 50.0, None),
    )
    (cause,) = causes(weight(2), number(2), number(4), drift=moves)
    assert cause.folded == (
        "behind it: 2 numbers of the forward pass moved, most: 'blocks.2.operator.frobenius_norm' by 10.0%"
    )
    assert cause.effects == [1, 2]


def test_what_the_user_notices_is_said_in_full() -> None:
    loss = outcome("behaviour.loss", message="loss 12.2, uniform 7.6")
    (cause,) = causes(weight(2), number(4), loss)
    assert cause.folded == "behind it: 1 number of the forward pass moved; behaviour.loss: loss 12.2, uniform 7.6"


def test_tensors_that_moved_and_one_that_is_new() -> None:
    new = outcome("drift.new", where="weights.lm_head.weight", message="1 tensor that the baseline lacks")
    (cause,) = causes(weight(2), weight(3), new)
    assert cause.message == (
        "2 tensors moved, first 'model.layers.2.o_proj.weight': all of o_proj in blocks 2-3; "
        "1 tensor that the baseline lacks"
    )
    assert causes(new)[0].message == "1 tensor that the baseline lacks"


def test_bounds_stand_for_themselves() -> None:
    assert brief(weight(2), outcome("bounds", block=3, where="blocks.3.density")) == [
        ("weights", 1, 0),
        ("bounds", 1, 0),
    ]


RULES = {
    "integrity.nonfinite": "files",
    "integrity.tokenizer": "tokenizer",
    "drift.tokenizer": "tokenizer",
    "drift.config": "config",
    "drift.weights": "weights",
    "drift.operator": "forward",
    "drift.integrity": "forward",
    "behaviour.loss": "forward",
    "adapter.magnitude": "adapter",
    "bounds": "policy",
    "exactness.certificate": "policy",
}


@pytest.mark.parametrize("rule", RULES)
def test_origins(rule: str) -> None:
    assert origin_of(outcome(rule)) == RULES[rule]
    new = outcome("drift.new", where="weights.lm_head.weight")
    assert (origin_of(new), origin_of(outcome("drift.new", where="blocks.6.density"))) == ("weights", "forward")


@st.composite
def anything(draw: st.DrawFn) -> Outcome:
    block = draw(st.none() | st.integers(0, 5))
    kinds = [f"weights.{name}" for name in TENSORS] + [f"blocks.{n}.operator.frobenius_norm" for n in range(6)]
    return outcome(
        draw(st.sampled_from(sorted(RULES))),
        status=draw(st.sampled_from(["failed", "warned", "passed", "skipped"])),
        block=block,
        where=draw(st.none() | st.sampled_from([*kinds, "model.layers"])),
    )


@given(st.lists(anything(), max_size=12))
def test_every_finding_stands_in_one_place(outcomes: list[Outcome]) -> None:
    found, made = grouped(outcomes, (), TENSORS)
    placed = sorted(at for cause in made for at in (*cause.findings, *cause.effects))
    assert placed == [at for at, o in enumerate(outcomes) if o.status in ("failed", "warned")]
    assert len({cause.id for cause in made}) == len(made)
    ranks = [cause.status == "warned" for cause in made]
    assert ranks == sorted(ranks)
    for cause in made:
        assert (cause.folded is None) == (not cause.effects)
        assert all(found[at].behind is None for at in cause.findings)
        assert all(found[at].behind == cause.id for at in cause.effects)
        if cause.status == "warned":
            assert all(outcomes[at].status == "warned" for at in cause.effects)
