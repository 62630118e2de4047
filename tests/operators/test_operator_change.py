"""The split of an operator's change against matrices written out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.operators.kronecker import HeadFactors, KroneckerSum
from duat_cli.operators.operator_change import gram_of_changes, maps_and_changes, split

sizes = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.integers(1, 5), st.integers(1, 3))


def draw(tokens: int, kv: int, groups: int, width: int, rank: int, seed: int) -> KroneckerSum:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((kv * groups, tokens, tokens), (kv, width, rank), (kv * groups, rank, width))
    left, value, output = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return KroneckerSum(left, HeadFactors(value, output))


def parts(base: Tensor, tuned: Tensor, factors: HeadFactors) -> dict[str, KroneckerSum]:
    """Each part as an operator; base, tuned: Ĥ and Ĥ', (heads, N, N); factors: of `maps_and_changes`."""
    zero, moved = torch.zeros_like(base), tuned - base
    lists = {
        "base": [base, zero, zero],
        "total": [moved, tuned, tuned],
        "routing": [moved, zero, zero],
        "weights": [zero, base, base],
        "interaction": [zero, moved, moved],
    }
    return {name: KroneckerSum(torch.cat(lefts), factors) for name, lefts in lists.items()}


@given(sizes, st.integers(0, 9))
def test_the_parts_add_up_and_have_these_norms(size: tuple[int, int, int, int, int], seed: int) -> None:
    base, tuned = draw(*size, seed), draw(*size, seed + 100)
    H, A, Ht, At = base.left, base.factors.maps(), tuned.left, tuned.factors.maps()
    expected = {"base": (H, A), "routing": (Ht - H, A), "weights": (H, At - A), "interaction": (Ht - H, At - A)}
    dense = {name: torch.stack([torch.kron(h, a.T.contiguous()) for h, a in zip(*f, strict=True)]).sum(0)
             for name, f in expected.items()}  # fmt: skip
    dense["total"] = tuned.dense() - base.dense()
    torch.testing.assert_close(dense["routing"] + dense["weights"] + dense["interaction"], dense["total"])
    factors = maps_and_changes(base.factors, tuned.factors)
    written = parts(H, Ht, factors)
    norms = split(H, Ht, gram_of_changes(base.factors, tuned.factors))
    for name, matrix in dense.items():
        torch.testing.assert_close(written[name].dense(), matrix)
        assert getattr(norms, name) == pytest.approx(float(matrix.norm()), abs=1e-9)


def test_a_small_change_loses_no_digits() -> None:
    base = draw(5, 2, 2, 6, 3, 0)
    value = base.factors.value * (1 + 1e-9)
    tuned = HeadFactors(value, base.factors.output)
    norms = split(base.left, base.left, gram_of_changes(base.factors, tuned))
    assert norms.weights == pytest.approx(1e-9 * norms.base, rel=1e-6)
    assert norms.total == norms.weights
    assert norms.routing == norms.interaction == 0.0


def test_channels_that_are_rotated_within_heads_change_what_their_rounding_does() -> None:
    base = draw(5, 2, 2, 16, 4, 0)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    before = HeadFactors(base.factors.value.float(), base.factors.output.float())
    after = HeadFactors((before.value.double() @ turn).float(), (turn.T @ before.output.double()).float())
    dense = [KroneckerSum(base.left, factors.in_float64()).dense() for factors in (before, after)]
    norms = split(base.left, base.left, gram_of_changes(before, after))
    assert norms.base == pytest.approx(float(dense[0].norm()), rel=1e-12)
    assert norms.weights == pytest.approx(float((dense[1] - dense[0]).norm()), rel=1e-6)
    assert 1e-8 < norms.weights / norms.base < 1e-7


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="other shapes"):
        maps_and_changes(draw(2, 1, 1, 4, 2, 0).factors, draw(2, 1, 1, 4, 3, 0).factors)
