"""Coupling numbers and the correlation of blocks, gathered row by row, against loops over the dense W'."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import (
    blocks_of,
    chunked,
    correlation_of,
    coupling_of,
    far,
    kron_sum,
    naive_coupling_numbers,
    weighted_coupling_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duat_cli.operators.coupling import (
    CouplingNumbers,
    CouplingSums,
    OperatorSums,
    ValueSquares,
    channel_squares,
    narrow,
)
from duat_cli.operators.kronecker import HeadFactors, gram, gram_root


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(heads: int, tokens: int, seed: int = 0, causal: bool = True) -> Tensor:
    scores = 2 * normal(heads, tokens, tokens, seed=seed)
    if causal:
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1)


def factors(heads: int, kv_heads: int, width: int, rank: int, seed: int = 20) -> HeadFactors:
    return HeadFactors(normal(kv_heads, width, rank, seed=seed), normal(heads, rank, width, seed=seed + 1))


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What rows of Ĥ, `step` at a time, add up to."""

    sums: OperatorSums
    squares: Tensor  # C²
    coupling: CouplingNumbers


def gathered(H: Tensor, known: HeadFactors, step: int) -> Gathered:
    sums, coupling = OperatorSums(gram_root(gram(known))), CouplingSums(kinds=2)
    squares = []
    for start, rows in chunked(H, step):
        squares.append(sums.add(rows)[0])
        coupling.add(torch.stack([torch.ones_like(squares[-1]), squares[-1]]), start)
    return Gathered(sums, torch.cat(squares), coupling.numbers(1))


def numbers_of(C: Tensor) -> CouplingNumbers:
    sums = CouplingSums(kinds=1)
    sums.add(C.double().square()[None], 0)
    return sums.numbers(0)


def assert_same(got: CouplingNumbers, expected: dict[str, float | None], tolerance: float = 1e-10) -> None:
    for name, value in dataclasses.asdict(got).items():
        if expected[name] is None:
            assert value is None, name
        else:
            assert value == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name


def _zero_row() -> Tensor:
    H = attention(3, 5)
    H[:, 2] = 0
    return H


MATRICES = {
    "causal": lambda: attention(4, 6),
    "full": lambda: attention(3, 5, causal=False),
    "window": lambda: attention(2, 6).tril().triu(-1),
    "signed": lambda: normal(3, 5, 5, seed=3),
    "zero row": _zero_row,
    "one token": lambda: attention(3, 1),
    "one head": lambda: attention(1, 5),
    "first row alone": lambda: torch.zeros(2, 4, 4, dtype=torch.float64).index_fill(1, torch.tensor([0]), 0.25),
}


@pytest.fixture(params=list(MATRICES))
def H(request: pytest.FixtureRequest) -> Tensor:  # noqa: N802
    return MATRICES[request.param]()


@pytest.fixture
def known(H: Tensor) -> HeadFactors:
    return factors(len(H), 1 if len(H) % 2 else len(H) // 2, 5, 3)


@pytest.fixture
def W(H: Tensor, known: HeadFactors) -> Tensor:  # noqa: N802
    return kron_sum(H, known.maps())


def test_block_norms_are_those_of_the_dense_blocks(H: Tensor, known: HeadFactors, W: Tensor) -> None:
    assert far(gathered(H, known, H.shape[-1]).squares.sqrt(), coupling_of(W, H.shape[-1])) <= 1e-10


def test_coupling_numbers_are_those_of_naive_loops(H: Tensor, known: HeadFactors, W: Tensor) -> None:
    assert_same(gathered(H, known, H.shape[-1]).coupling, naive_coupling_numbers(coupling_of(W, H.shape[-1])))


def test_block_correlation_is_that_of_all_pairs(H: Tensor, known: HeadFactors, W: Tensor) -> None:
    sums = gathered(H, known, H.shape[-1]).sums
    assert sums.block_correlations()[0] == pytest.approx(correlation_of(W, H.shape[-1]), rel=1e-10)


def test_head_products_and_nonzero_blocks(H: Tensor, known: HeadFactors, W: Tensor) -> None:
    sums = gathered(H, known, 2).sums
    expected = torch.tensor([[float((a * b).sum()) for b in H] for a in H], dtype=torch.float64)
    assert far(sums.head_products, expected) <= 1e-12
    assert sums.nonzero_blocks == int((blocks_of(W, H.shape[-1]) != 0).flatten(2).any(-1).sum())


@pytest.mark.parametrize("step", [1, 2, 3])
def test_chunks_add_up_to_the_whole(H: Tensor, known: HeadFactors, step: int) -> None:
    whole, parts = gathered(H, known, H.shape[-1]), gathered(H, known, step)
    assert far(parts.squares, whole.squares) <= 1e-14
    assert far(parts.sums.head_products, whole.sums.head_products) <= 1e-14
    assert parts.sums.block_correlations()[0] == pytest.approx(whole.sums.block_correlations()[0], rel=1e-13)
    assert_same(parts.coupling, dataclasses.asdict(whole.coupling), 1e-13)


@pytest.mark.parametrize("width", [1, 3])
def test_the_value_weighted_coupling_is_that_of_naive_products(width: int) -> None:
    """‖B_ij x_j‖ with x_j = s_j-scaled tokens: v_jh = x_j V_h, on grouped heads of one channel and of three."""
    H, known = attention(8, 5), factors(8, 4, 6, width)
    X = normal(5, 6, seed=40)
    values = (X @ known.value).repeat_interleave(2, 0)  # (heads, N, d)
    brought = ValueSquares(values, known.output)
    expected = weighted_coupling_of(kron_sum(H, known.maps()), X)
    assert far(brought.of(H).sqrt(), expected) <= 1e-10
    assert far(brought.of(H[:, 1:3, :4]).sqrt(), expected[1:3, :4]) <= 1e-10
    everything = torch.ones(8, 1, 5, dtype=torch.float64)
    assert far(brought.of_sums(), brought.of(everything)[0]) <= 1e-12


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-4])
def test_what_nearly_cancelling_heads_bring_keeps_its_digits_in_float32(apart: float) -> None:
    """Two heads that carry the same of every second token and write it back nearly negated."""
    known, H, values = factors(2, 2, 16, 4), attention(2, 6), normal(2, 6, 4, seed=7)
    values[1, ::2] = values[0, ::2]
    output = torch.stack([known.output[0], apart * known.output[1] - known.output[0]])
    H[1] = H[0]
    single = (values.float(), output.float())
    exact = ValueSquares(*(one.double() for one in single)).of(H.float().double())
    got = ValueSquares(*single).of(H.float())
    assert got.dtype == torch.float32
    there = exact > 0
    assert float((got[there] / exact[there] - 1).abs().max()) <= 1e-6 / apart
    assert far(ValueSquares(*single).of_sums(), ValueSquares(*(one.double() for one in single)).of_sums()) <= 1e-5


@pytest.mark.parametrize("heads", [4, 20])
def test_entries_too_small_to_square_change_no_number_and_still_count(heads: int) -> None:
    """In float32, where a decay goes down to 1e-45 in some heads; blocks that only such entries reach are not zero."""
    known, H = factors(heads, heads, 6, 3), attention(heads, 8)
    H[1] *= torch.logspace(0, -44, 8, dtype=torch.float64)[:, None]
    H[:, 6] = H[:, 6] * 1e-40
    single = HeadFactors(known.value.float(), known.output.float())
    got, expected = gathered(H.float(), single, 8), gathered(H, known, 8)
    assert int(got.sums.nonzero_blocks) == int(expected.sums.nonzero_blocks) == 36
    assert far(got.sums.head_products, expected.sums.head_products) <= 1e-6
    [correlation], [wanted] = got.sums.block_correlations(), expected.sums.block_correlations()
    assert correlation == pytest.approx(wanted, rel=1e-4)


def test_a_head_that_writes_nothing_hides_none_that_writes_little() -> None:
    known = factors(20, 20, 6, 3)
    known.output[0] = 0.0
    H = attention(20, 8) * 1e-18
    H[0] = 1.0
    single = HeadFactors(known.value.float(), known.output.float())
    got, expected = gathered(H.float(), single, 8), gathered(H, known, 8)
    assert int(got.sums.nonzero_blocks) == int(expected.sums.nonzero_blocks) == 36
    assert far(got.squares.sqrt(), expected.squares.sqrt()) <= 1e-5
    assert got.sums.block_correlations()[0] == pytest.approx(expected.sums.block_correlations()[0], rel=1e-5)


def test_by_channels_and_by_heads_are_the_same() -> None:
    values, output, H = normal(4, 5, 3, seed=1), normal(4, 3, 20, seed=2), attention(4, 5)
    by_heads = ValueSquares(values, output).of(H)
    assert far(channel_squares(H, values, narrow(output.flatten(0, 1))), by_heads) <= 1e-12


def test_a_zero_operator_has_no_numbers() -> None:
    nothing = gathered(torch.zeros(2, 3, 3, dtype=torch.float64), factors(2, 2, 4, 2), 3)
    assert nothing.sums.block_correlations()[0] is None
    assert float(nothing.squares.abs().max()) == 0.0
    assert set(dataclasses.asdict(nothing.coupling).values()) == {None}


def test_coupling_of_known_matrices() -> None:
    """Uniform over N tokens: log2 N bits, N tokens; diagonal: 0 bits, 1 token, nothing off the diagonal."""
    assert_same(numbers_of(torch.ones(8, 8)), {
        "off_diagonal_share": 7 / 8, "entropy_bits": 3.0, "effective_context": 8.0,
        "mean_distance": sum(abs(i - j) for i in range(8) for j in range(8)) / 64, "first_token_share": 1 / 8,
        "distance_deviation": (21 / 64) ** 0.5,  # of 3.5, 2.75, 2.25, 2, 2, 2.25, 2.75, 3.5
    })  # fmt: skip
    assert_same(numbers_of(torch.eye(8)), {
        "off_diagonal_share": 0.0, "entropy_bits": 0.0, "effective_context": 1.0, "mean_distance": 0.0,
        "distance_deviation": 0.0, "first_token_share": 0.0,
    })  # fmt: skip


@pytest.mark.parametrize("start", [0, 5])
def test_the_deviation_of_distances_tells_a_sink_from_a_shift(start: int) -> None:
    """All rows read the first token: their distances are 0 … 7. Each reads the one before it: all are 1."""
    sink, before = torch.zeros(8, 8), torch.ones(7).diag(-1)
    sink[:, 0] = 1
    for squares, expected in ((sink, (63 / 12) ** 0.5), (before, 0.0)):
        sums = CouplingSums(kinds=1)
        for rows, first in ((squares[:start], 0), (squares[start:], start)):
            sums.add(rows[None], first)
        assert sums.numbers(0).distance_deviation == pytest.approx(expected, rel=1e-14)


def test_a_small_deviation_of_far_distances_is_not_lost_in_single_precision() -> None:
    """Rows 1000 … 1999 read 1000 tokens back, every other one a thousandth of a token less on average."""
    squares = torch.zeros(1000, 2000)
    rows = torch.arange(1000)
    squares[rows, rows], squares[rows[::2], rows[::2] + 1] = 1.0, 1e-3
    sums = CouplingSums(kinds=1)
    sums.add(squares[None], 1000)
    step = 1 - 1 / 1.001
    assert sums.numbers(0).distance_deviation == pytest.approx(step / 2, rel=0.1)


def test_correlation_of_known_blocks() -> None:
    """All blocks multiples of one map: 1. Orthogonal maps of one size, used equally often: 1/sqrt(heads)."""
    same = OperatorSums(gram_root(torch.ones(2, 2, dtype=torch.float64)))
    same.add(attention(2, 4))
    assert same.block_correlations()[0] == pytest.approx(1.0, rel=1e-12)
    orthogonal = OperatorSums(torch.eye(2, dtype=torch.float64))
    H = torch.zeros(2, 2, 2, dtype=torch.float64)
    H[0, 0, 0] = H[1, 1, 1] = 1.0
    orthogonal.add(H)
    assert orthogonal.block_correlations()[0] == pytest.approx(2**-0.5, rel=1e-12)


def scaled_rows(H: Tensor, factor: float) -> Tensor:
    small = H.clone()
    small[:, 1:] *= factor
    return small


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float64, 1e-60), (torch.float32, 1e-12), (torch.float32, 1e-25)])
def test_small_blocks_count_as_much_as_large_ones(dtype: torch.dtype, factor: float) -> None:
    """A block is zero where its weights are zero, and a cosine does not see its size: softmax goes down to 1e-45."""
    H, known = attention(3, 5), factors(3, 3, 4, 2)
    expected = gathered(H, known, 5).sums
    sums = gathered(scaled_rows(H, factor).to(dtype), known, 5).sums
    assert sums.nonzero_blocks == expected.nonzero_blocks == 15
    assert sums.block_correlations()[0] == pytest.approx(expected.block_correlations()[0], rel=1e-5)


@settings(max_examples=30)
@given(heads=st.integers(1, 5), tokens=st.integers(1, 7), step=st.integers(1, 7), seed=st.integers(0, 10**6))
def test_bounds_that_hold_for_every_operator(heads: int, tokens: int, step: int, seed: int) -> None:
    H, known = attention(heads, tokens, seed), factors(heads, 1, 5, 3, seed)
    found = gathered(H, known, step)
    sums, squares, numbers = found.sums, found.squares, found.coupling
    correlation = sums.block_correlations()[0]
    assert correlation is not None
    assert heads**-0.5 - 1e-12 <= correlation <= 1 + 1e-12
    assert numbers.entropy_bits is not None
    assert numbers.effective_context is not None
    assert -1e-12 <= numbers.entropy_bits <= math.log2(tokens) + 1e-12
    assert 2**numbers.entropy_bits - 1e-9 <= numbers.effective_context <= (tokens + 1) / 2 + 1e-9  # causal; Jensen
    assert float(squares.sum()) == pytest.approx(float((sums.head_products * gram(known)).sum()), rel=1e-10)
    assert far(squares.triu(1), torch.zeros_like(squares)) == 0.0


def test_several_operators_at_once_are_each_alone() -> None:
    """With an axis in front of every tensor; one of them has W' = 0."""
    known = factors(4, 2, 5, 3)
    rows = torch.stack([attention(4, 6, seed=k) for k in (1, 2, 3)])
    rows[1] = 0.0
    several = OperatorSums(gram_root(gram(known)), several=3)
    parts = [several.add(rows[:, :, start : start + 4]) for start in (0, 4)]
    squares, alive = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
    values = normal(3, *rows.shape[1:3], known.output.shape[1], seed=4)
    weighted = ValueSquares(values, known.output).of(rows)
    for k, correlation in enumerate(several.block_correlations()):
        alone = gathered(rows[k], known, 6)
        assert far(squares[k], alone.squares) < 1e-13
        assert far(several.head_products[k], alone.sums.head_products) < 1e-13
        assert int(several.nonzero_blocks[k]) == int(alone.sums.nonzero_blocks) == int(alive[k].sum())
        [expected] = alone.sums.block_correlations()
        assert (correlation or 0.0) == pytest.approx(expected or 0.0, rel=1e-12)
        assert (correlation is None) == (expected is None) == (k == 1)
        assert far(weighted[k], ValueSquares(values[k], known.output).of(rows[k])) < 1e-13


def test_block_norms_of_heads_that_nearly_cancel_keep_their_digits_in_float32() -> None:
    known = factors(2, 1, 16, 4)
    known = HeadFactors(known.value, torch.stack([known.output[0], 1e-5 * known.output[1] - known.output[0]]))
    H = attention(1, 6).expand(2, -1, -1).float()
    root = gram_root(gram(known))
    expected = coupling_of(kron_sum(H.double(), known.maps()), 6).square()
    precise, quick = (OperatorSums(root, cancels=cancels).add(H)[0] for cancels in (True, False))
    assert precise.dtype == torch.float32
    assert far(precise, expected) <= 1e-5  # G's least eigenvalue is 1e-10 of its largest, which has 1e-16 of rounding
    assert far(quick, expected) > 1e-4
