"""The parts of a change of W' between two inputs, against dense matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from duat_cli.operators import input_change
from duat_cli.operators.input_change import Routed, change, share_from
from duat_cli.operators.kronecker import HeadFactors, KroneckerSum, gram

HEADS, KV, WIDTH, D = 4, 2, 6, 3


def drawn(tokens: int, seed: int, *, per_row: bool = True) -> Routed:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    H = normal(HEADS, tokens, tokens).softmax(-1)
    return Routed(H, normal(HEADS, tokens).exp(), normal(tokens).exp() if per_row else torch.ones(1).double())


@pytest.fixture(scope="module")
def factors() -> HeadFactors:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(KV, WIDTH, D, generator=generator, dtype=torch.float64)
    return HeadFactors(value, torch.randn(HEADS, D, WIDTH, generator=generator, dtype=torch.float64))


def dense(H: torch.Tensor, source: torch.Tensor, token: torch.Tensor, factors: HeadFactors) -> torch.Tensor:
    """W' written out, (N M, N M)."""
    return KroneckerSum(token.reshape(-1, 1) * H * source[:, None, :], factors).dense()


def cut(one: Routed, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    token = one.token if one.token.numel() == 1 else one.token[places]
    return one.attention[:, places[:, None], places], one.source[:, places], token


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("elements", [1, 40, 1 << 20])
def test_every_part_is_that_of_the_dense_matrices(
    per_row: bool, elements: int, factors: HeadFactors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_change, "ELEMENTS", elements)
    before, after = drawn(7, 2, per_row=per_row), drawn(9, 3, per_row=per_row)
    a, b = torch.tensor([0, 2, 3, 6]), torch.tensor([1, 2, 5, 8])
    found = change(before, after, (a, b), gram(factors))
    (H, s, t), (G, u, v) = cut(before, a), cut(after, b)
    base = dense(H, s, t, factors)
    routing = dense(G, s, t, factors) - base
    scale = dense(H, u, v, factors) - base
    total = dense(G, u, v, factors) - base
    parts = {"relative": total, "routing": routing, "scale": scale, "interaction": total - routing - scale}
    for name, part in parts.items():
        assert found.whole is not None
        assert found.whole[name] == pytest.approx(float(part.norm() / base.norm()), rel=1e-12)
    for head, numbers in enumerate(found.heads):
        one = HeadFactors(factors.value[head // 2][None], factors.output[head][None])
        alone = [dense(x[[head]], y[[head]], z, one) for x, y, z in ((H, s, t), (G, u, v))]
        assert numbers is not None
        assert numbers["relative"] == pytest.approx(float((alone[1] - alone[0]).norm() / alone[0].norm()), rel=1e-12)


def test_a_small_change_is_no_difference_of_large_numbers(factors: HeadFactors) -> None:
    before, every = drawn(6, 4), torch.arange(6)
    after = Routed(before.attention * (1 + 1e-9), before.source, before.token)
    found = change(before, after, (every, every), gram(factors)).whole
    assert found is not None
    assert found["routing"] == pytest.approx(1e-9, rel=1e-6)
    assert found["scale"] == found["interaction"] == 0.0
    same = change(before, before, (every, every), gram(factors))
    assert same.whole == dict.fromkeys(input_change.PARTS, 0.0)


@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_the_share_is_that_of_the_dense_blocks(
    elements: int, factors: HeadFactors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_change, "ELEMENTS", elements)
    one = drawn(5, 5)
    rows, columns = torch.tensor([1, 4]), torch.tensor([0, 3])
    whole, heads = share_from(one, rows, columns, gram(factors))
    squares = dense(one.attention, one.source, one.token, factors).reshape(5, WIDTH, 5, WIDTH).square().sum((1, 3))
    assert whole == pytest.approx(float(squares[rows][:, columns].sum() / squares[rows].sum()), rel=1e-12)
    left = (one.attention * one.source[:, None, :] * one.token[:, None]).square()
    for head, share in enumerate(heads):
        assert share == pytest.approx(float(left[head][rows][:, columns].sum() / left[head][rows].sum()), rel=1e-12)
    assert share_from(one, rows, torch.arange(5), gram(factors))[0] == 1.0


def test_what_is_zero_has_no_relative_change(factors: HeadFactors) -> None:
    one, every = drawn(4, 6), torch.arange(4)
    zero = Routed(torch.zeros_like(one.attention), one.source, one.token)
    found = change(zero, one, (every, every), gram(factors))
    assert found.whole is None
    assert found.heads == [None] * HEADS
    assert share_from(zero, every, every, gram(factors))[0] is None


def test_uniform_attention_keeps_scales_and_mask() -> None:
    one = drawn(3, 7)
    even = one.uniform(torch.ones(3, 3).tril().bool())
    expected = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [1 / 3] * 3]).double()
    assert torch.allclose(even.attention, expected.expand(HEADS, 3, 3), atol=1e-7)
    assert even.source is one.source


def test_uniform_attention_keeps_the_gate_of_a_head() -> None:
    """A gate is part of the scales, and says nothing of where attention looks."""
    gate, seen = torch.arange(1.0, 1 + 3 * HEADS).double().reshape(HEADS, 3), torch.ones(3, 3).tril().bool()
    even = replace(drawn(3, 7), token=gate).uniform(seen)
    assert torch.equal(even.attention, drawn(3, 7).uniform(seen).attention)
    assert even.token is gate


def test_uniform_attention_over_values_of_two_tokens_is_shifted_as_h_is() -> None:
    """U S_1 beside U: the value that a row sees at token j holds token j - 1 as well."""
    even = replace(drawn(3, 7), offsets=(0, 1)).uniform(torch.ones(3, 3).tril().bool())
    shifted = torch.tensor([[0, 0, 0], [0.5, 0, 0], [1 / 3, 1 / 3, 0]]).double()
    assert torch.allclose(even.attention[HEADS // 2 :], shifted.expand(HEADS // 2, 3, 3), atol=1e-7)
    plain = drawn(3, 7).uniform(torch.ones(3, 3).tril().bool())
    assert torch.equal(even.attention[: HEADS // 2], plain.attention[: HEADS // 2])


def test_scales_by_head_and_token_are_part_of_the_dense_matrices(factors: HeadFactors) -> None:
    """As of a gate, where every head is a channel."""
    token = torch.randn(2, HEADS, 7, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    one, two = (replace(drawn(7, 2 + k), token=token[k]) for k in range(2))
    places = torch.tensor([0, 2, 3, 6])
    found = change(one, two, (places, places), gram(factors)).whole

    def cut_out(of: Routed) -> tuple[torch.Tensor, torch.Tensor]:
        scale = of.token[:, places, None] * of.source[:, None, places]
        return of.attention[:, places[:, None], places], scale

    (H, S), (H_b, S_b) = cut_out(one), cut_out(two)
    lefts = {"relative": H_b * S_b - H * S, "routing": (H_b - H) * S, "scale": H * (S_b - S)}
    base = KroneckerSum(H * S, factors).dense().norm()
    assert found is not None
    for name, left in lefts.items():
        assert found[name] == pytest.approx(float(KroneckerSum(left, factors).dense().norm() / base), rel=1e-10)
