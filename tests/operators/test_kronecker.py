"""The closed forms of W' = Σ_h Ĥ_h ⊗ (V_h O_h)ᵀ against the matrix itself, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import blocks_of, coupling_of, effective_number, far, kron_sum, kronecker_singular_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.operators.kronecker import (
    HeadFactors,
    KroneckerSum,
    effective_heads,
    frobenius_norm,
    gram,
    gram_root,
    gram_row,
    kronecker_spectrum,
    quick_gram,
    told_apart,
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One W' with everything needed to build it by definition."""

    left: Tensor
    factors: HeadFactors

    @property
    def operator(self) -> KroneckerSum:
        return KroneckerSum(self.left, self.factors)

    @property
    def maps(self) -> Tensor:
        """A_h = V_h O_h, head by head, the grouping written out."""
        share = self.factors.output.shape[0] // self.factors.value.shape[0]
        return torch.stack([self.factors.value[h // share] @ out for h, out in enumerate(self.factors.output)])

    @property
    def W(self) -> Tensor:  # noqa: N802
        return kron_sum(self.left, self.maps)

    @property
    def K(self) -> Tensor:  # noqa: N802
        flat = self.left.flatten(1)
        return flat @ flat.T


def spectrum_of(case: Case) -> Tensor:
    return kronecker_spectrum(case.K, gram_root(gram(case.factors)))


def make(heads: int, kv_heads: int, tokens: int, width: int, rank: int, seed: int = 0, causal: bool = True) -> Case:
    scores = 2 * normal(heads, tokens, tokens, seed=seed)
    if causal:
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -math.inf)
    factors = HeadFactors(normal(kv_heads, width, rank, seed=seed + 1), normal(heads, rank, width, seed=seed + 2))
    return Case(scores.softmax(-1) * normal(heads, 1, tokens, seed=seed + 3).exp(), factors)


def _zero_row() -> Case:
    case = make(3, 3, 5, 4, 2)
    case.left[:, 2] = 0
    return case


def _twins() -> Case:
    """Two heads with the same map and two with the same attention: W' has fewer Kronecker products than heads."""
    case = make(4, 4, 5, 6, 3)
    case.factors.value[1], case.factors.output[1] = case.factors.value[0], case.factors.output[0]
    case.left[3] = case.left[2]
    return case


CASES = {
    "causal": lambda: make(4, 4, 5, 6, 3),
    "full": lambda: make(3, 3, 6, 5, 2, causal=False),
    "grouped": lambda: make(6, 2, 5, 7, 2),
    "one kv head": lambda: make(4, 1, 5, 6, 3),
    "one head": lambda: make(1, 1, 5, 6, 3),
    "one token": lambda: make(4, 2, 1, 6, 3),
    "one of everything": lambda: make(1, 1, 1, 1, 1),
    "more rank than width": lambda: make(2, 2, 4, 3, 5),
    "signed": lambda: Case(normal(3, 5, 5, seed=9), make(3, 3, 5, 4, 2).factors),
    "zero row": _zero_row,
    "twins": _twins,
    "zero": lambda: Case(torch.zeros(3, 4, 4, dtype=torch.float64), make(3, 3, 4, 5, 2).factors),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def test_dense_is_the_sum_of_kronecker_products(case: Case) -> None:
    assert far(case.operator.dense(), case.W) <= 1e-10


def test_maps_follow_the_grouping(case: Case) -> None:
    assert far(case.factors.maps(), case.maps) <= 1e-10
    assert case.factors.groups * case.factors.value.shape[0] == case.factors.heads == len(case.maps)


def test_apply_is_the_dense_product_with_the_row_major_vector(case: Case) -> None:
    X = normal(case.left.shape[-1], case.factors.hidden_size, seed=7)
    assert far(case.operator.apply(X).reshape(-1), case.W @ X.reshape(-1)) <= 1e-10


def test_apply_transposed_is_the_dense_product_with_the_transpose(case: Case) -> None:
    Y = normal(case.left.shape[-1], case.factors.hidden_size, seed=8)
    assert far(case.operator.apply_transposed(Y).reshape(-1), case.W.T @ Y.reshape(-1)) <= 1e-10


def test_apply_says_what_attention_does() -> None:
    """vec(Σ_h Ĥ_h X A_h), head by head, token by token: the convention itself."""
    case = make(2, 1, 3, 4, 2)
    X = normal(3, 4, seed=5)
    out = torch.zeros(3, 4, dtype=torch.float64)
    for h in range(2):
        for i in range(3):
            for j in range(3):
                out[i] += case.left[h, i, j] * (X[j] @ case.maps[h])
    assert far(case.operator.apply(X), out) <= 1e-10


def test_the_block_from_j_to_i_is_the_transposed_mix_of_head_maps() -> None:
    case = make(3, 3, 4, 5, 2)
    B = blocks_of(case.operator.dense(), 4)
    for i in range(4):
        for j in range(4):
            assert far(B[i, j], sum(case.left[h, i, j] * case.maps[h].T for h in range(3))) <= 1e-10


def test_gram_is_the_inner_products_of_the_head_maps(case: Case) -> None:
    expected = torch.tensor([[float((A * B).sum()) for B in case.maps] for A in case.maps], dtype=torch.float64)
    assert far(gram(case.factors), expected) <= 1e-10


def test_a_row_of_gram_is_that_row(case: Case) -> None:
    for head in range(case.factors.heads):
        expected = torch.stack([(case.maps[head] * B).sum() for B in case.maps])
        assert far(gram_row(case.factors, head), expected) <= 1e-10


def test_gram_of_float32_factors_is_float64_and_close() -> None:
    case = make(6, 2, 5, 7, 2)
    single = HeadFactors(case.factors.value.float(), case.factors.output.float())
    assert gram(single).dtype == torch.float64
    assert far(gram(single), gram(case.factors)) <= 1e-6


def test_gram_root_squares_to_gram(case: Case) -> None:
    G = gram(case.factors)
    R = gram_root(G)
    assert far(R @ R, G) <= 1e-10
    assert far(R.T, R) <= 1e-10


def test_gram_root_drops_what_rounding_made_negative() -> None:
    G = torch.diag(torch.tensor([4.0, 0.0, -1e-18], dtype=torch.float64))
    root = torch.diag(torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64))
    assert far(gram_root(G), root) <= 1e-15
    turn = torch.linalg.qr(torch.arange(9.0, dtype=torch.float64).reshape(3, 3).sin()).Q
    assert far(gram_root(turn @ G @ turn.T), turn @ root @ turn.T) <= 1e-8


def test_frobenius_norm(case: Case) -> None:
    assert far(frobenius_norm(case.K, gram(case.factors)), float(case.W.square().sum()) ** 0.5) <= 1e-10


def test_block_norms_are_the_quadratic_form(case: Case) -> None:
    """C_ij = sqrt(ĥ_ijᵀ G ĥ_ij)."""
    H = case.left
    squares = torch.einsum("hij,hk,kij->ij", H, gram(case.factors), H)
    assert far(squares.clamp_min(0).sqrt(), coupling_of(case.W, H.shape[-1])) <= 1e-10


def test_kronecker_spectrum_is_that_of_the_rearranged_operator(case: Case) -> None:
    got = spectrum_of(case)
    dense = kronecker_singular_values(case.W, case.left.shape[-1])
    expected = torch.zeros_like(got)
    expected[: len(dense)] = dense[: len(got)]
    # Squares, because the root of a rounding error of 1e-16 is 1e-8.
    assert far(got.square(), expected.square()) <= 1e-10
    assert bool((got[:-1] >= got[1:]).all())
    assert float(dense[len(got) :].square().sum()) <= 1e-20 * max(float(dense[0]) ** 2, 1.0)


def test_the_spectrum_of_a_difference_uses_signs() -> None:
    """Σ Ĥ ⊗ A - Σ Ĥ' ⊗ A' on the concatenated factors: the distance of two operators."""
    one, two = make(3, 3, 4, 5, 2, seed=0), make(3, 3, 4, 5, 2, seed=50)
    both = Case(
        torch.cat([one.left, -two.left]),
        HeadFactors(torch.cat([one.factors.value, two.factors.value]),
                    torch.cat([one.factors.output, two.factors.output])),
    )  # fmt: skip
    W = one.W - two.W
    assert far(frobenius_norm(both.K, gram(both.factors)), float(W.norm())) <= 1e-10
    got = spectrum_of(both)
    assert far(got.square(), kronecker_singular_values(W, 4)[:6].square()) <= 1e-10


def test_effective_heads_is_the_entropy_of_the_dense_spectrum(case: Case) -> None:
    got = effective_heads(spectrum_of(case))
    if not bool(case.W.any()):
        assert got is None
    else:
        assert got is not None
        assert far(got, effective_number(kronecker_singular_values(case.W, case.left.shape[-1]))) <= 1e-10


def test_effective_heads_of_known_spectra() -> None:
    assert effective_heads(torch.ones(8, dtype=torch.float64)) == pytest.approx(8, abs=1e-12)
    assert effective_heads(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1, abs=1e-6)
    assert effective_heads(torch.zeros(3)) is None


def test_twin_heads_are_counted_once() -> None:
    """Four heads, two pairs of which act as one each: two Kronecker products."""
    spectrum = spectrum_of(_twins())
    assert float(spectrum[1] / spectrum[0]) > 1e-2
    assert float(spectrum[2] / spectrum[0]) < 1e-7
    one = make(1, 1, 5, 6, 3)
    pair = Case(one.left.repeat(2, 1, 1), HeadFactors(one.factors.value, one.factors.output.repeat(2, 1, 1)))
    assert effective_heads(spectrum_of(pair)) == pytest.approx(1.0, abs=1e-6)


def test_dense_refuses_a_side_over_the_limit() -> None:
    case = make(2, 2, 4, 5, 2)
    assert case.operator.dense(limit=20).shape == (20, 20)
    with pytest.raises(InputError, match="20 x 20"):
        case.operator.dense(limit=19)


@pytest.mark.parametrize(
    ("value", "output"), [((3, 5, 2), (4, 2, 5)), ((2, 5, 2), (4, 3, 5))], ids=["heads not a multiple", "ranks differ"]
)
def test_factors_that_do_not_fit_are_refused(value: tuple[int, ...], output: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="do not fit"):
        HeadFactors(torch.zeros(value), torch.zeros(output))


def test_values_that_read_vectors_of_another_width_make_a_matrix_that_is_not_square() -> None:
    generator = torch.Generator().manual_seed(3)
    value, output, left, X = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 5, 2), (4, 2, 6), (4, 3, 3), (3, 5))
    )
    operator = KroneckerSum(left, HeadFactors(value, output))
    W = operator.dense()
    assert W.shape == (18, 15)
    assert torch.allclose((W @ X.flatten()).reshape(3, 6), operator.apply(X))


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))


@settings(max_examples=25)
@given(shape=SHAPES, seed=st.integers(0, 10**6))
def test_apply_transposed_is_the_adjoint(shape: tuple[int, ...], seed: int) -> None:
    kv_heads, groups, tokens, width, rank = shape
    operator = make(kv_heads * groups, kv_heads, tokens, width, rank, seed).operator
    X, Y = normal(tokens, width, seed=seed + 10), normal(tokens, width, seed=seed + 11)
    left, right = float((operator.apply(X) * Y).sum()), float((X * operator.apply_transposed(Y)).sum())
    scale = float(operator.apply(X).norm() * Y.norm()) + 1e-300
    assert abs(left - right) <= 1e-12 * scale


@settings(max_examples=25)
@given(shape=SHAPES, seed=st.integers(0, 10**6), factor=st.floats(1e-3, 1e3))
def test_norm_and_spectrum_scale_and_agree(shape: tuple[int, ...], seed: int, factor: float) -> None:
    kv_heads, groups, tokens, width, rank = shape
    case = make(kv_heads * groups, kv_heads, tokens, width, rank, seed)
    G = gram(case.factors)
    norm, spectrum = frobenius_norm(case.K, G), spectrum_of(case)
    assert far(float(spectrum.square().sum()) ** 0.5, norm) <= 1e-10
    assert far(frobenius_norm(factor**2 * case.K, G), factor * norm) <= 1e-10
    number = effective_heads(spectrum)
    assert number is not None
    assert 1 - 1e-12 <= number <= kv_heads * groups + 1e-12


def test_values_of_a_stream_that_is_narrower_than_the_weights() -> None:
    """Some models keep the stream in float32 whatever their weights are."""
    factors = HeadFactors(normal(2, 6, 3, seed=1), normal(4, 3, 6, seed=2))
    x = normal(5, 6, seed=3).float()
    assert torch.equal(factors.values_of(x), factors.values_of(x.double()))
    assert factors.values_of(x).dtype == torch.float64


def _cancelling(left_over: float, seed: int = 0) -> HeadFactors:
    """Two heads of one V in float32, whose O are each other's negative up to that."""
    value, output, rest = (normal(1, *shape, seed=seed + k) for k, shape in enumerate([(16, 4), (4, 16), (4, 16)]))
    return HeadFactors(value.float(), torch.cat([output, -output + left_over * rest]).float())


@pytest.mark.parametrize("left_over", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
def test_the_norm_of_a_sum_that_nearly_cancels_keeps_its_digits_in_float32(left_over: float) -> None:
    factors = _cancelling(left_over)
    K = torch.ones(2, 2, dtype=torch.float64)
    expected = float(factors.in_float64().maps().sum(0).norm())
    assert frobenius_norm(K, gram(factors)) == pytest.approx(expected, rel=1e-5)
    if left_over <= 1e-3:
        assert frobenius_norm(K, quick_gram(factors)) != pytest.approx(expected, rel=1e-5)


def test_maps_are_told_apart_unless_some_sum_of_them_is_small() -> None:
    apart = gram(make(4, 2, 3, 16, 4).factors)
    assert told_apart(apart)
    assert told_apart(torch.diag(torch.tensor([1.0, 0.0, 1e-30], dtype=torch.float64)))
    apart[1] = apart[:, 1] = 0  # a head that writes nothing
    assert told_apart(apart)
    assert told_apart(gram(_cancelling(1.0)))
    assert not told_apart(gram(_cancelling(1e-2)))
    assert not told_apart(gram(_twins().factors))


def test_products_of_maps_that_are_told_apart_stay_in_their_dtype() -> None:
    factors = make(4, 2, 3, 16, 4).factors
    narrow = HeadFactors(factors.value.float(), factors.output.float())
    assert torch.equal(gram(narrow), quick_gram(narrow))
