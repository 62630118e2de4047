"""Functions that are stood in for: every argument is handled or refused, none is dropped."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers import single_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from duat_cli.analysis.support import examine
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.attention import AttentionCall, Watch
from duat_cli.models.instrument.interception import ClampFreezer, HeldClamp, SoftmaxInterception

HEADS, TOKENS, WIDTH = 4, 5, 8


class Listener:
    """Keeps every call; replaces nothing."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def captured(self, call: AttentionCall) -> None:
        self.calls.append(call)

    def replacement(self, module: nn.Module, value: Tensor) -> None:
        return None


def watched(call: Any) -> tuple[Tensor, list[AttentionCall]]:
    listener = Listener()
    with SoftmaxInterception(Watch(listener), nn.Identity):
        return call(), listener.calls


def heads(seed: int, count: int = HEADS) -> Tensor:
    return torch.randn(1, count, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


Q, K, V = heads(1), heads(2), heads(3)
BIAS = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(4))
SEEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
NOTHING_SEEN = SEEN.clone()
NOTHING_SEEN[2] = False
CALLS = {
    "plain": lambda: sdpa(Q, K, V),
    "causal by position": lambda: sdpa(Q, K, V, None, 0.0, True),
    "causal by name": lambda: sdpa(query=Q, key=K, value=V, is_causal=True),
    "bias by position": lambda: sdpa(Q, K, V, BIAS),
    "boolean mask": lambda: sdpa(Q, K, V, attn_mask=SEEN),
    "a row that sees nothing": lambda: sdpa(Q, K, V, NOTHING_SEEN),
    "scale": lambda: sdpa(Q, K, V, scale=0.3),
    "scale of zero": lambda: sdpa(Q, K, V, scale=0.0),
    "grouped heads": lambda: sdpa(Q, heads(2, 2), heads(3, 2), enable_gqa=True),
    "one head of keys for all": lambda: sdpa(Q, heads(2, 1), heads(3, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_written_out_attention_is_torchs_own(name: str) -> None:
    expected = CALLS[name]()
    seen, [call] = watched(CALLS[name])
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    assert call.rows.heads == HEADS


LAYER = nn.MultiheadAttention(HEADS * WIDTH, HEADS)
TURNED = [t.transpose(1, 2).flatten(2).transpose(0, 1) for t in (Q, K, V)]  # tokens in front of the batch


@pytest.mark.parametrize(
    ("mask", "weights"), [(None, True), (None, False), (BIAS, True), (BIAS, False), (~SEEN, True), (~SEEN, False)]
)
def test_attention_within_one_function_of_torch_is_seen(mask: Tensor | None, weights: bool) -> None:
    expected, its_own = LAYER(*TURNED, attn_mask=mask, average_attn_weights=False)
    (seen, _), [call] = watched(lambda: LAYER(*TURNED, attn_mask=mask, need_weights=weights))
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([rows for _, rows in call.rows.chunks()], dim=1), its_own[0])


REFUSED = {
    "dropout": (lambda: sdpa(Q, K, V, None, 0.1), "at random"),
    "mask and causal": (lambda: sdpa(Q, K, V, SEEN, is_causal=True), "is_causal"),
    "a product into memory": (lambda: torch.matmul((Q @ K.mT).softmax(-1), V, out=torch.empty(0)), "out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str) -> None:
    call, word = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=word):
        watched(call)


def test_an_argument_of_a_newer_torch_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sinks"):
        SoftmaxInterception(Watch(Listener()), nn.Identity).__torch_function__(sdpa, (), (Q, K, V), {"sinks": 1})


@pytest.mark.parametrize(
    "product",
    [
        lambda h: torch.matmul(input=h, other=V),
        lambda h: h @ V,
        lambda h: torch.bmm(h[0], mat2=V[0])[None],
        lambda h: torch.einsum("bhij,bhjd->bhid", h, V),
        lambda h: torch.einsum("bsij, bsjk -> bsik", h, V),
        lambda h: torch.einsum("bhqk,bkhd->bqhd", h, V.transpose(1, 2)).transpose(1, 2),
        lambda h: torch.einsum("bhqk,kbhd->qbhd", h, V.permute(2, 0, 1, 3)).permute(1, 2, 0, 3),
    ],
)
def test_the_product_behind_a_softmax_is_seen_however_it_is_called(product: Any) -> None:
    def attend() -> Tensor:
        return product((Q @ K.mT).softmax(-1))

    expected = attend()
    seen, [call] = watched(attend)
    torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(call.output[0].transpose(0, 1), expected[0])


@pytest.mark.parametrize(
    "equation",
    [
        "bhij,bhid->bhjd",  # Hᵀ V
        "bhij,bgjd->bhid",  # summed over the value's heads
        "bhij,bhjd->bid",  # summed over heads
        "bhij,bhjd->bhd",  # summed over tokens
    ],
)
def test_an_einsum_behind_a_softmax_that_is_no_product_of_h_and_v_is_left_alone(equation: str) -> None:
    seen, calls = watched(lambda: torch.einsum(equation, (Q @ K.mT).softmax(-1), V))
    assert calls == []
    assert torch.equal(seen, torch.einsum(equation, (Q @ K.mT).softmax(-1), V))


def test_the_stand_in_knows_every_argument_of_torchs_function() -> None:
    documented = (sdpa.__doc__ or "").partition("(")[2].partition(")")[0]
    names = [part.partition("=")[0].strip() for part in documented.split(",")]
    assert list(inspect.signature(SoftmaxInterception._explicit).parameters)[1:] == names


def test_a_held_clamp_cuts_where_it_cut_and_nowhere_else() -> None:
    x = torch.tensor([[0.5, 3.0, -4.0]])
    clamps: list[HeldClamp] = []
    with ClampFreezer(Watch(Listener()), clamps, held=False):
        assert torch.equal(x.clamp(-1, 1), torch.tensor([[0.5, 1.0, -1.0]]))
        y = x.clone()
        assert y.clamp_(min=-2) is y
    assert len(clamps) == 2
    other = torch.tensor([[9.0, 9.0, 9.0], [0.0, 0.0, 0.0]])
    with ClampFreezer(Watch(Listener()), clamps, held=True):
        assert torch.equal(other.clamp(-1, 1), torch.tensor([[9.0, 1.0, -1.0], [0.0, 1.0, -1.0]]))
        again = other.clone()
        assert again.clamp_(min=-2) is again
        assert torch.equal(again, torch.tensor([[9.0, 9.0, -2.0], [0.0, 0.0, -2.0]]))


def test_attention_that_really_clips_rebuilds_exactly_and_has_no_operator() -> None:
    model = single_model("dbrx")
    for module in model.modules():
        if hasattr(module, "clip_qkv"):
            module.clip_qkv = 0.5
    entry = examine(model)
    assert entry.relative_error is not None
    assert entry.relative_error <= 1e-5
    assert entry.status == "partly"
    assert all("clips what it computes" in part for part in entry.parts)
