"""KL against its definition in plain Python, and at the ends of the range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from duat_cli.statistics.divergence import kl, kl_each, mean_loss

INF = math.inf


def by_hand(before: list[float], after: list[float]) -> float:
    """In probabilities, term by term; what has probability 0 before adds nothing."""
    p, q = ([math.exp(x - max(row)) for x in row] for row in (before, after))
    terms = [(a / sum(p), b / sum(q)) for a, b in zip(p, q, strict=True)]
    return math.fsum(a * math.log(a / b) if b else INF for a, b in terms if a > 0)


def one(before: list[float], after: list[float]) -> float:
    return float(kl(*(torch.tensor([row], dtype=torch.float64) for row in (before, after)))[0])


def test_rows_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = (3 * torch.randn(4, 9, generator=generator) for _ in range(2))
    expected = [by_hand(a, b) for a, b in zip(before.tolist(), after.tolist(), strict=True)]
    assert kl(before, after).tolist() == pytest.approx(expected, rel=1e-9)
    assert kl(before, before + 2.5).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0.3, 1.0, -INF], [0.9, -0.5, -INF]),  # ruled out by both
        ([0.3, 1.0, -INF], [0.9, -0.5, 4.0]),  # by the first alone: adds nothing
        ([0.3, 1.0, -2000.0], [0.9, -0.5, -INF]),  # p below the smallest float
        ([-INF, 1.0], [-INF, 7.0]),
    ],
)
def test_tokens_that_are_ruled_out(before: list[float], after: list[float]) -> None:
    assert one(before, after) == pytest.approx(by_hand(before, after), rel=1e-9)
    assert math.isfinite(one(before, after))


def test_what_only_the_second_rules_out_is_infinite() -> None:
    assert one([0.3, 1.0], [0.9, -INF]) == INF


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-INF, -INF], [INF, 1.0]])
def test_no_distribution_has_no_divergence(bad: list[float]) -> None:
    for pair in ((bad, [0.0, 1.0]), ([0.0, 1.0], bad)):
        assert math.isnan(one(*pair))


def test_a_narrow_dtype_is_widened_first() -> None:
    before: Tensor = torch.tensor([[0.0, 1.0, 2.0]]).bfloat16()
    after = torch.tensor([[0.0, 1.0, 2.015625]]).bfloat16()
    assert float(kl(before, after)) == pytest.approx(by_hand(before[0].tolist(), after[0].tolist()), rel=1e-9)


def test_several_beside_one_are_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    before, afters = torch.randn(7, 11, generator=generator), torch.randn(3, 7, 11, generator=generator)
    whole = kl_each(before, afters)
    assert whole.shape == (3, 7)
    monkeypatch.setattr("duat_cli.statistics.divergence.AT_ONCE", 22)
    for row, cut, after in zip(whole, kl_each(before, afters), afters, strict=True):
        assert torch.allclose(row, kl(before, after), rtol=1e-12)
        assert torch.equal(row, cut)


def test_the_loss_is_torchs_own() -> None:
    logits, chosen = torch.randn(7, 11, generator=torch.Generator().manual_seed(6)), torch.arange(7)
    assert mean_loss(logits, chosen) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, chosen)))
