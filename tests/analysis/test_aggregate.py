"""Means and spreads over prompts, field by field."""

from __future__ import annotations

import random
import statistics
from typing import Annotated

import pytest

from duat_cli.analysis.aggregate import ExactSum, Mean, mean_over, spreads
from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.inspect import Spread
from duat_cli.results.meaning import Meaning
from duat_cli.results.operator import Coupling, OperatorStats
from duat_cli.results.terms import Part, Parts, Terms

NAMES = (
    "off_diagonal_share",
    "entropy_bits",
    "effective_context",
    "mean_distance",
    "distance_deviation",
    "first_token_share",
)


def coupling(base: float, **other: float | None) -> Coupling:
    values: dict[str, float | None] = {name: base + k for k, name in enumerate(NAMES)}
    return Coupling(**(values | other), reasons={n: "because" for n, v in other.items() if v is None})


def part(share: float | None, norm: float) -> Part:
    return Part(share=share, norm=norm, reasons={} if share is not None else {"share": "zero"})


def terms(share: float, pre: float | None) -> Terms:
    inner = None if pre is None else Parts(linear=part(pre, 1.0), static=part(0.0, 0.0), dynamic=part(1 - pre, 2.0))
    return Terms(
        linear=part(share, 1.0), static=part(0.25, 0.5), dynamic=part(0.75 - share, 1.5),
        own=part(0.5 - share, 0.5), pre_activation=inner,
        reasons={} if inner else {"pre_activation": "no FFN"},
    )  # fmt: skip


def operator(norm: float, error: float, rows: float = 32) -> OperatorStats:
    return OperatorStats(
        rows=rows, columns=rows, dense_bytes=4 * rows**2, frobenius_norm=norm, spectral_norm=None, stable_rank=None,
        effective_heads=2.0, block_correlation=0.5, certificate_error=error,
        reasons={"spectral_norm": "computed with --spectrum", "stable_rank": "computed with --spectrum"},
    )  # fmt: skip


class Counted(WithReasons):
    known: Annotated[Finite | None, Meaning("share", "exact", over_prompts="known")]
    mean: Annotated[Finite | None, Meaning("share", "exact")]
    count: Annotated[int | None, Meaning("rows", "exact", over_prompts="sum")]


def counted(known: float | None, mean: float | None, count: int | None) -> Counted:
    return Counted.explained("because", known=known, mean=mean, count=count)


def test_what_some_prompts_do_not_have_is_a_mean_over_the_others_and_counts_are_added_up() -> None:
    got = mean_over([counted(None, None, 0), counted(0.25, 1.0, 3), counted(0.75, 2.0, 3)])
    assert (got.known, got.mean, got.count) == (0.5, None, 6)
    assert got.reasons == {"mean": "because"}
    assert mean_over([counted(0.25, 1.0, 3)]) == counted(0.25, 1.0, 3)
    assert mean_over([counted(0.25, 1.0, 3)] * 40).count == 120
    assert mean_over([counted(None, 1.0, 0)] * 2) == counted(None, 1.0, 0)
    assert mean_over([counted(None, 1.0, 2), counted(None, 1.0, None)]).count is None


def test_numbers_become_means() -> None:
    got = mean_over([coupling(0.0), coupling(1.0), coupling(5.0)])
    assert [getattr(got, name) for name in NAMES] == pytest.approx([2.0, 3.0, 4.0, 5.0, 6.0, 7.0], rel=1e-15)
    assert got.reasons == {}


def test_a_mean_is_the_rounded_one_in_any_order() -> None:
    """Numbers of all sizes, so that a plain sum depends on the order."""
    drawn = random.Random(5)
    for _ in range(50):
        values = [drawn.uniform(-1, 1) * 2.0 ** drawn.randint(-1074, 900) for _ in range(drawn.randint(2, 40))]
        values += [1e16, 1.0, -1e16, 5e-324]
        for _ in range(2):
            total = ExactSum()
            for value in values:
                total.add(value)
            assert total.mean() == statistics.fmean(values)
            drawn.shuffle(values)


def test_results_one_by_one_are_the_results_together() -> None:
    """Second way: every number over a list of them, by the standard library."""
    drawn = random.Random(3)
    results = [coupling(drawn.random()) for _ in range(30)]
    mean: Mean[Coupling] = Mean()
    for result in results:
        mean.add(result)
    assert [getattr(mean.value(), n) for n in NAMES] == [
        statistics.fmean(getattr(r, n) for r in results) for n in NAMES
    ]


def test_one_result_is_itself() -> None:
    for result in (coupling(0.1), coupling(0.1, entropy_bits=None), terms(0.3, 0.2), operator(1.0, 1e-7)):
        assert mean_over([result]) == result


def test_null_anywhere_is_null_with_its_reason() -> None:
    got = mean_over([coupling(0.0), coupling(1.0, first_token_share=None)])
    assert got.first_token_share is None
    assert got.reasons == {"first_token_share": "because"}
    assert got.mean_distance == pytest.approx(3.5)


def test_the_first_reason_stands() -> None:
    one = Coupling(**dict.fromkeys(NAMES), reasons=dict.fromkeys(NAMES, "first"))
    two = Coupling(**dict.fromkeys(NAMES), reasons=dict.fromkeys(NAMES, "second"))
    assert set(mean_over([one, two]).reasons.values()) == {"first"}


def test_a_certificate_is_the_largest_and_never_a_mean() -> None:
    assert mean_over([operator(1.0, 1e-7), operator(3.0, 5e-6), operator(2.0, 1e-8)]).certificate_error == 5e-6
    assert mean_over([operator(1.0, 1e-7), operator(3.0, 5e-6)]).frobenius_norm == pytest.approx(2.0)


class Sample(WithReasons):
    worst: Annotated[Finite, Meaning(over_prompts="largest")] = 1.0
    certificate_error: Annotated[Finite, Meaning("relative", "measured")] = 1.0
    chosen: Annotated[Finite, Meaning(over_prompts="same")] = 1.0
    unsaid: Finite = 1.0


def test_a_field_is_merged_as_its_metadata_says_whatever_its_name() -> None:
    got = mean_over([Sample(), Sample(worst=5.0, certificate_error=2.0)])
    assert (got.worst, got.certificate_error, got.chosen, got.unsaid) == (5.0, 1.5, 1.0, 1.0)


@pytest.mark.parametrize("name", ["chosen", "unsaid"])
def test_what_has_no_way_to_be_merged_is_no_mean(name: str) -> None:
    with pytest.raises(ValueError, match=f"Sample.{name} differs between prompts"):
        mean_over([Sample(), Sample(**{name: 2.0})])


def test_sizes_of_prompts_of_several_lengths_are_means() -> None:
    got = mean_over([operator(1.0, 0.0, rows=32), operator(1.0, 0.0, rows=64)])
    assert got.rows == 48
    assert got.dense_bytes == pytest.approx((4 * 32**2 + 4 * 64**2) / 2)


def test_nested_results_are_merged_field_by_field() -> None:
    got = mean_over([terms(0.25, 0.5), terms(0.75, 0.0)])
    assert got.linear.share == pytest.approx(0.5)
    assert got.dynamic.share == pytest.approx(0.25)
    assert got.pre_activation is not None
    assert got.pre_activation.linear.share == pytest.approx(0.25)
    assert got.pre_activation.dynamic.norm == 2.0
    assert got.linear.share + got.static.share + got.dynamic.share == pytest.approx(1.0)


def test_a_nested_null_is_null_with_its_reason() -> None:
    got = mean_over([terms(0.25, 0.5), terms(0.75, None)])
    assert got.pre_activation is None
    assert got.reasons == {"pre_activation": "no FFN"}


def test_spreads_are_those_of_the_values() -> None:
    got = spreads({"coupling": [coupling(0.0), coupling(1.0), coupling(5.0)], "terms": [terms(0.25, 0.5)] * 3})
    entropy = got["coupling.entropy_bits"]
    assert (entropy.low, entropy.mean, entropy.high) == pytest.approx((1.0, 3.0, 6.0))
    assert entropy.standard_deviation == pytest.approx((14 / 3) ** 0.5)  # of the prompts at hand, not of a sample
    assert got["terms.linear.share"].standard_deviation == 0.0
    assert got["terms.pre_activation.dynamic.norm"].mean == 2.0


def test_what_has_no_value_under_some_prompt_has_no_spread() -> None:
    got = spreads({"coupling": [coupling(0.0), coupling(1.0, entropy_bits=None)], "terms": [terms(0.2, None)] * 2})
    assert "coupling.entropy_bits" not in got
    assert "coupling.mean_distance" in got
    assert not any("pre_activation" in name or "reasons" in name for name in got)


class Rows(Result):
    numbers: Annotated[list[float], Meaning("sizes", "exact")]
    rows: Annotated[list[Spread] | None, Meaning()]


def test_lists_are_averaged_place_by_place_as_far_as_the_shortest_goes() -> None:
    row = Spread(low=1.0, mean=2.0, high=3.0, standard_deviation=0.5)
    some = [Rows(numbers=[1.0, 2.0, 9.0], rows=[row, row]), Rows(numbers=[3.0, 5.0], rows=[row])]
    assert mean_over(some) == mean_over(some[::-1]) == Rows(numbers=[2.0, 3.5], rows=[row])
    assert mean_over([*some, Rows(numbers=[1.0], rows=None)]).rows is None
