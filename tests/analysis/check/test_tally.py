"""Sums over predictions, against loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from duat_cli.analysis.check import tally as module
from duat_cli.analysis.check.tally import Tally, unigram
from duat_cli.statistics import divergence


def drawn(tokens: int = 7, vocabulary: int = 13) -> torch.Tensor:
    return 2 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(2))


def test_tallies_are_added_up_as_if_all_predictions_had_come_to_one() -> None:
    whole, parts, logits = Tally(), Tally(), drawn()
    logits[1, 2] = math.nan
    for first, last, targets in ((0, 3, [3, 1]), (3, 3, []), (3, 7, [1, 5, 9, 2])):
        part = Tally()
        if last > first:
            part.add(logits[first:last], targets)
            whole.add(logits[first:last], targets)
        parts.include(part)
    assert str(vars(parts)) == str(vars(whole))  # as text, in which a NaN is one
    assert (whole.nonfinite, len(whole.targets), len(whole.tokens), whole.vocabulary) == (1, 6, 7, 13)
    assert 0 < parts.never == whole.never < 1


def test_tallies_that_share_a_set_of_likely_tokens_add_up_to_the_same() -> None:
    logits = drawn()
    apart, together = Tally(), Tally()
    for whole, parts in ((apart, [Tally(), Tally()]), (together, [Tally(together.likely), Tally(together.likely)])):
        for part, rows in zip(parts, logits.split(4), strict=True):
            part.add(rows, [])
        for part in parts:
            whole.include(part)
    assert 0 < together.never == apart.never < 1
    assert str(vars(together)) == str(vars(apart))


def test_of_equally_likely_tokens_the_first_is_the_most_likely() -> None:
    logits = torch.zeros(2, 500)
    logits[1, 100:400] = 1.0
    tally = Tally()
    tally.add(logits, [])
    assert tally.tokens == [0, 100]
    assert tally.margins == [0.0, 0.0]


@pytest.mark.parametrize("at_once", [1, 30, 1 << 22])
def test_every_number_is_that_of_a_loop(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "AT_ONCE", at_once)
    logits, targets = drawn(), [3, 1, 4, 1, 5, 9]  # the last token's next one is not known
    tally = Tally()
    tally.add(logits[:3], targets[:3])
    tally.add(logits[3:], targets[3:])
    likely = set()
    for row, z in enumerate(logits.double().tolist()):
        total = math.fsum(math.exp(x) for x in z)
        p = [math.exp(x) / total for x in z]
        likely |= {v for v, x in enumerate(p) if x >= 1 / 13}
        if row < len(targets):
            assert tally.losses[row] == pytest.approx(-math.log(p[targets[row]]), rel=1e-12)
        assert tally.entropies[row] == pytest.approx(-math.fsum(x * math.log(x) for x in p), rel=1e-12)
        assert tally.ranges[row] == pytest.approx(max(z) - min(z))
        first, second = sorted(range(13), key=lambda v: -z[v])[:2]
        mean = math.fsum(z) / 13
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in z) / 13)
        assert tally.tokens[row] == first
        assert tally.margins[row] == pytest.approx((z[first] - z[second]) / spread)
    assert len(tally.losses) == 6
    assert tally.loss == pytest.approx(math.fsum(tally.losses) / 6)
    assert tally.never == pytest.approx(1 - len(likely) / 13)
    assert tally.largest == pytest.approx(float(logits.abs().max()))
    assert (tally.nonfinite, tally.vocabulary, tally.targets) == (0, 13, targets)


def test_what_is_not_finite_is_counted_and_spoils_no_other_number() -> None:
    logits = drawn()
    logits[1, 2], logits[4, 0], logits[4, 1] = math.nan, math.inf, -math.inf
    tally = Tally()
    tally.add(logits, [0, 1, 2])
    assert tally.nonfinite == 2  # -Inf rules a token out
    assert math.isnan(tally.loss)
    assert all(map(math.isfinite, [*tally.ranges, *tally.margins, tally.largest]))
    assert tally.tokens[4] == 0


def test_a_token_that_is_ruled_out_has_an_infinite_loss_and_no_entropy() -> None:
    logits = drawn(1)
    logits[0, 3] = -math.inf
    tally = Tally()
    tally.add(logits, [3])
    assert math.isinf(tally.loss)
    assert math.isfinite(tally.entropies[0])


def test_the_unigram_leaves_every_token_out_of_its_own_counts() -> None:
    targets, vocabulary = [1, 2, 1, 1, 7, 2], 10
    losses = []
    for place, token in enumerate(targets):
        others = targets[:place] + targets[place + 1 :]
        losses.append(-math.log((others.count(token) + 1) / (len(others) + vocabulary)))
    assert unigram(targets, vocabulary) == pytest.approx(math.fsum(losses) / len(losses), rel=1e-14)


def test_a_unigram_of_tokens_that_are_all_different_knows_less_than_the_uniform_distribution() -> None:
    """Counts that include the token itself would have a loss of log 20, whatever the text."""
    assert unigram(list(range(20)), 1000) == pytest.approx(math.log(1019))
    assert unigram([5], 1000) == pytest.approx(math.log(1000))


def test_nothing_has_no_loss() -> None:
    assert math.isnan(module.Tally().loss)
