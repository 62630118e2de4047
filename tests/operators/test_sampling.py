"""Numerical density: counting, sampling, and whether the interval is what it claims."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import kron_sum
from torch import Tensor

from duat_cli.operators.kronecker import HeadFactors
from duat_cli.operators.sampling import (
    ShareEstimate,
    exact_multiples,
    exact_share,
    sample_entries,
    sampled_shares,
    wilson_interval,
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def left() -> Tensor:
    scores = 3 * normal(4, 9, 9, seed=0)
    return scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -math.inf).softmax(-1)


@pytest.fixture(scope="module")
def factors() -> HeadFactors:
    return HeadFactors(normal(2, 8, 3, seed=1), normal(4, 3, 8, seed=2))


@pytest.fixture(scope="module")
def dense(left: Tensor, factors: HeadFactors) -> Tensor:
    return kron_sum(left, factors.maps()).abs()


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.6, 0.9, 0.999])
def test_the_exact_share_is_the_count(left: Tensor, factors: HeadFactors, dense: Tensor, quantile: float) -> None:
    ordered = dense.flatten().sort().values
    k = int(quantile * (len(ordered) - 1))
    cutoff = float(ordered[k] + ordered[k + 1]) / 2  # between two entries, so that rounding cannot matter
    got = exact_share(left, factors.maps(), cutoff)
    assert got.share == int((dense > cutoff).sum()) / dense.numel()
    assert got.low == got.share == got.high


def test_the_exact_share_of_extremes(left: Tensor, factors: HeadFactors, dense: Tensor) -> None:
    assert exact_share(left, factors.maps(), 0.0).share == int((dense > 0).sum()) / dense.numel() == 45 / 81
    assert exact_share(left, factors.maps(), float(dense.max()) * 2).share == 0.0


@pytest.mark.parametrize("pairs", [1, 5, 6])
def test_many_blocks_are_counted_as_few(factors: HeadFactors, pairs: int) -> None:
    """Products are made by column where there are enough blocks, by row of the rest."""
    left = normal(4, pairs, 7, seed=11)
    dense = torch.einsum("hij,hab->ijab", left, factors.maps()).abs()
    for cutoff in (0.0, float(dense.median()), float(dense.max())):
        assert exact_share(left, factors.maps(), cutoff).share == int((dense > cutoff).sum()) / dense.numel()


def test_multiples_of_one_matrix_are_counted_by_a_search(factors: HeadFactors) -> None:
    """Second way: every block written out, zeros among them."""
    total = factors.maps().sum(dim=0)
    sizes = normal(6, 6, seed=12).abs() * (normal(6, 6, seed=13) > 0)
    dense = sizes[:, :, None, None] * total.abs()
    ordered = dense.flatten().sort().values
    for k in (len(ordered) // 2 + 3, int(0.9 * len(ordered)), len(ordered) - 2):
        cutoff = float(ordered[k] + ordered[k + 1]) / 2
        found = exact_multiples(sizes[sizes > 0], total.abs().flatten().sort().values, sizes.numel(), cutoff)
        assert found.share == int((dense > cutoff).sum()) / dense.numel()
    assert exact_multiples(sizes[:0], total.abs().flatten().sort().values, 36, 0.1).share == 0.0


def sampled_share(pairs: Tensor, entries: Tensor, cutoff: float, nonzero: float) -> ShareEstimate:
    """Of one W'."""
    [found] = sampled_shares(pairs[None], entries, [cutoff], [nonzero])
    assert found is not None
    return found


def test_shares_of_several_are_those_of_each(factors: HeadFactors) -> None:
    entries = sample_entries(factors, 50, seed=14)
    vectors = normal(3, 50, 4, seed=15)
    cutoffs, nonzero = [0.1, 1.0, 3.0], [1.0, 0.5, 0.25]
    alone = [sampled_share(v, entries, c, n) for v, c, n in zip(vectors, cutoffs, nonzero, strict=True)]
    assert sampled_shares(vectors, entries, cutoffs, nonzero) == alone
    assert len({one.share for one in alone}) == 3
    assert sampled_shares(vectors[:, :0], entries, cutoffs, nonzero) == [None] * 3


def test_sampled_entries_are_entries_of_the_head_maps(factors: HeadFactors) -> None:
    """Every draw is (A_1[a, b] … A_h[a, b]) of one place (a, b)."""
    places = factors.maps().permute(1, 2, 0).reshape(-1, 4)  # (M M, heads)
    distance = torch.cdist(sample_entries(factors, 300, seed=5), places).min(dim=1)
    assert float(distance.values.max()) <= 1e-7 * float(places.norm())


def test_sampled_entries_are_uniform(factors: HeadFactors) -> None:
    """Each of the 64 places is drawn with the same chance: chi-square below its 99.9 % quantile (63 degrees)."""
    places = factors.maps().permute(1, 2, 0).reshape(-1, 4)
    nearest = torch.cdist(sample_entries(factors, 6400, seed=6), places).argmin(dim=1)
    counts = torch.bincount(nearest, minlength=64).double()
    assert float(((counts - 100) ** 2 / 100).sum()) < 103.4


def test_a_seed_gives_the_same_draws_and_another_gives_others(factors: HeadFactors) -> None:
    assert torch.equal(sample_entries(factors, 50, seed=1), sample_entries(factors, 50, seed=1))
    assert not torch.equal(sample_entries(factors, 50, seed=1), sample_entries(factors, 50, seed=2))
    assert torch.equal(sample_entries(factors, 50, seed=1, first=7), sample_entries(factors, 50, seed=1)[:7])


def draw_pairs(left: Tensor, count: int, seed: int) -> Tensor:
    """ĥ_ij of uniformly drawn nonzero blocks."""
    alive = (left != 0).any(0).nonzero()
    at = alive[torch.randint(len(alive), (count,), generator=torch.Generator().manual_seed(seed))]
    return left[:, at[:, 0], at[:, 1]].T


def test_sampling_is_unbiased_and_its_interval_covers(left: Tensor, factors: HeadFactors, dense: Tensor) -> None:
    """400 seeds: the mean within four standard errors of the truth, and about 95 % of the intervals hold it."""
    cutoff = 0.5 * float(dense.square().mean().sqrt())
    truth = exact_share(left, factors.maps(), cutoff).share
    draws, seeds, nonzero = 200, 400, 45 / 81
    shares, covered = [], 0
    for seed in range(seeds):
        pairs, entries = draw_pairs(left, draws, seed), sample_entries(factors, draws, 10_000 + seed)
        got = sampled_share(pairs, entries, cutoff, nonzero)
        assert 0 <= got.low <= got.share <= got.high <= nonzero
        shares.append(got.share)
        covered += got.low <= truth <= got.high
    p = truth / nonzero
    standard_error = nonzero * math.sqrt(p * (1 - p) / (draws * seeds))
    assert abs(sum(shares) / seeds - truth) <= 4 * standard_error
    assert 0.92 <= covered / seeds <= 0.985


def test_the_coverage_check_can_fail(left: Tensor, factors: HeadFactors, dense: Tensor) -> None:
    """Forgetting the share of zero blocks leaves the truth outside most intervals."""
    cutoff = 0.5 * float(dense.square().mean().sqrt())
    truth = exact_share(left, factors.maps(), cutoff).share
    covered = 0
    for seed in range(50):
        got = sampled_share(draw_pairs(left, 200, seed), sample_entries(factors, 200, 10_000 + seed), cutoff, 1.0)
        covered += got.low <= truth <= got.high
    assert covered <= 5


@pytest.mark.parametrize(
    ("hits", "draws", "low", "high"),
    [  # R: prop.test(x, n, correct = FALSE), and Wilson's formula by hand for 0 and n
        (5, 10, 0.236593090512564, 0.763406909487436),
        (1, 20, 0.008881438, 0.236131193),
        (81, 263, 0.255281978, 0.366210348),  # Newcombe (1998), table I: 0.2553 to 0.3662
        (0, 20, 0.0, 3.841458820694124 / (20 + 3.841458820694124)),
        (20, 20, 20 / (20 + 3.841458820694124), 1.0),
    ],
)
def test_wilson_interval_of_known_values(hits: int, draws: int, low: float, high: float) -> None:
    got = wilson_interval(hits, draws)
    assert got[0] == pytest.approx(low, abs=2e-5)
    assert got[1] == pytest.approx(high, abs=2e-5)


@pytest.mark.parametrize(("hits", "draws"), [(1, 7), (3, 7), (50, 1000), (999, 1000)])
def test_wilson_limits_solve_their_equation(hits: int, draws: int) -> None:
    """Both limits p satisfy |hits/draws - p| = z sqrt(p (1 - p) / draws)."""
    for p in wilson_interval(hits, draws):
        assert abs(hits / draws - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / draws), rel=1e-9)
