"""Values that a block in front hands on: W' reads them, and what a replay puts into the mapping goes no further."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model
from sharing import gemma4, mistral_large4
from torch import Tensor, nn

import duat_cli as duat
from duat_cli.analysis.decomposition import Decomposition
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.beside import beside, hidden_slot
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Event, Trace

IDS = torch.tensor([[12, 15, 18, 22, 31, 15, 19]])
FIRST = 2
"""The first block that shares; block 0 hands on to 2, block 1 to 3."""


@pytest.fixture(scope="module")
def model() -> Any:
    """Its last two layers have neither keys nor values of their own; in float64."""
    made = gemma4().model.double()
    made.set_attn_implementation("eager")
    return made


@pytest.fixture(scope="module")
def structure(model: Any) -> ModelStructure:
    return discover(model)


def runs_of(structure: ModelStructure) -> list[tuple[BlockRun, Any]]:
    """Every block with its W'."""
    found, decomposition = [], Decomposition()

    def listen(run: BlockRun) -> None:
        found.append((run, decomposition.advance(run).operator(run, structure.block(run.index))))

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, IDS), listen)
    return found


def test_they_are_found_where_they_are_handed_on(structure: ModelStructure) -> None:
    assert [block.parts.handed for block in structure.blocks] == ["", "", "values", "values"]
    for block in structure.blocks[FIRST:]:
        assert block.factors is not None
        assert block.factors.own
        assert block.parts.attention[0] in block.parts.units
        assert block.parts.attention[0] in block.parts.mixing
    assert not any(block.parts.handed for block in discover(single_model("gemma4_text")).blocks)


def test_a_replay_hands_nothing_on(structure: ModelStructure) -> None:
    with torch.no_grad():
        plain = run_stack(structure.stack, IDS)[0]
    with structure.rig().active() as rig:
        seen = rig.run(lambda: run_stack(structure.stack, IDS), lambda run: run.replay(torch.ones_like(run.input)))
    assert torch.equal(seen[0], plain)


def test_their_operator_is_that_of_values_of_the_block_in_front(model: Any, structure: ModelStructure) -> None:
    """W' against H (x) O built dense, with H of the model's own eager attention and its own norm behind O."""
    values: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.v_norm.register_forward_hook(lambda _m, _a, out, n=n: values.__setitem__(n, out[0]))
        for n, layer in enumerate(model.layers[:FIRST])
    ]
    with torch.no_grad():
        weights = model(IDS, output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    for (run, operator), H, layer in list(zip(runs_of(structure), weights, model.layers, strict=True))[FIRST:]:
        handed = values[run.index - FIRST]  # (N, kv_heads, d)
        tokens, kv, d = handed.shape
        heads = H.shape[1]
        out = layer.self_attn.o_proj.weight.detach().T.reshape(heads, d, -1)
        group = heads // kv
        summed = sum(H[0, h] @ handed[:, h // group] @ out[h] for h in range(heads))
        norm = layer.post_attention_layernorm
        scale = (summed.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        expected = torch.zeros(tokens, out.shape[-1], tokens, kv, d, dtype=out.dtype)
        for h in range(heads):
            reaching = out[h] * norm.weight.detach()
            expected[:, :, :, h // group] += torch.einsum("ij,dm->imjd", H[0, h] * scale, reaching)
        dense = operator.matrix().dense(limit=8192)
        assert dense.shape == (tokens * out.shape[-1], tokens * kv * d)
        torch.testing.assert_close(dense, expected.reshape(dense.shape), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(operator.image(), norm(summed).detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sum_is_exact_and_parts_add_up(model: Any, dtype: torch.dtype) -> None:
    prompts = [IDS[0].tolist(), [9, 8, 7]]
    single = model.float() if dtype == torch.float32 else model
    try:
        assert duat.verify(single, prompts=prompts).certificate.exact
        report = duat.attribute(single, prompts=prompts, target="3")
        assert report.certificate.exact
        assert not report.skipped
        mixing = {unit.block for unit in report.attribution[0].parts.units if unit.mixes}
        assert mixing == {FIRST, FIRST + 1}
    finally:
        model.double()


def test_values_made_of_a_latent_that_is_handed_on() -> None:
    """Mistral Large 4 hands on what keys and values are made of, and is read by its softmax."""
    model = mistral_large4()
    assert [block.parts.handed for block in discover(model).blocks] == ["", "latent", "latent"]
    config = model.config
    for block, layer in list(zip(discover(model).blocks, model.layers, strict=True))[1:]:
        assert block.factors is not None
        weight = layer.self_attn.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        value = weight[:, -config.v_head_dim :].mT  # (heads, rank of the latent, d)
        torch.testing.assert_close(block.factors.heads.value, value, rtol=0, atol=0)
    report = duat.verify(model, prompts=[IDS[0].tolist()])
    assert report.certificate.exact
    assert all(block.operator_error is not None and block.operator_error < 1e-5 for block in report.blocks)


def called(given: Tensor, inner: Tensor, layer: nn.Module | None = None) -> tuple[Event, Trace]:
    """A call of a block that gives what it takes, and a call of a layer inside of it."""
    block, layer = nn.Identity(), layer or nn.Identity()
    event = Event(block, (given,), {}, given)
    return event, Trace([Event(layer, (inner,), {}, inner), event])


def test_several_streams_a_token_are_read_as_one() -> None:
    """By what the layers inside take: one stream of the tokens."""
    for states, first in ((torch.randn(1, 5, 3, 8), False), (torch.randn(3, 1, 5, 8), True)):
        event, written = called(states, torch.randn(1, 5, 8))
        slot = hidden_slot(event, written)
        assert (slot.streams, slot.first) == (3, first)
        read = slot.get(event.args, event.kwargs)
        assert read.shape == (1, 5, 24)
        assert torch.equal(read[0, 4, 8:16], states[1, 0, 4] if first else states[0, 4, 1])
        [put], _ = slot.put(event.args, event.kwargs, read)
        assert torch.equal(put, states)
        assert torch.equal(slot.found((states, "more"), read), read)
        kept = slot.exchanged((states, "more"), read, 2 * read)
        assert torch.equal(kept[0], 2 * states)
        assert kept[1] == "more"


def test_tokens_in_front_of_the_batch_are_read_behind_it() -> None:
    states = torch.randn(5, 1, 8)
    event, written = called(states, states)
    slot = hidden_slot(event, written)
    assert slot.turned
    read = slot.get(event.args, event.kwargs)
    assert torch.equal(read, states.transpose(0, 1))
    [put], _ = slot.put(event.args, event.kwargs, read)
    assert torch.equal(put, states)
    assert torch.equal(slot.found((states, None), read), read)
    assert torch.equal(slot.exchanged((states, None), read, 2 * read)[0], 2 * states)


def test_a_map_of_tokens_is_read_row_by_row_where_a_layer_takes_it() -> None:
    states = torch.randn(1, 5, 3, 8)
    event, written = called(states, states, nn.Linear(8, 2))
    slot = hidden_slot(event, written)
    assert slot.grid == (5, 3)
    read = slot.get(event.args, event.kwargs)
    assert torch.equal(read[0, 4], states[0, 1, 1])
    [put], _ = slot.put(event.args, event.kwargs, read)
    assert torch.equal(put, states)
    assert torch.equal(slot.found((states, None), read), read)
    assert torch.equal(slot.exchanged((states, None), read, 2 * read)[0], 2 * states)


@pytest.mark.parametrize(("layer", "channels"), [(nn.Identity(), 5), (nn.Conv2d(5, 2, 1), 5), (nn.GroupNorm(1, 8), 8)])
def test_other_maps_are_refused(layer: nn.Module, channels: int) -> None:
    """Channels may stand in front, as many as the map is wide."""
    states = torch.randn(1, channels, 3, 8)
    event, written = called(states, states, layer)
    written.events[0] = Event(layer, (states,), {}, layer(states))
    with pytest.raises(UnsupportedModelError, match="four axes, which are no streams of a token but a map"):
        hidden_slot(event, written)


@pytest.mark.parametrize("states", [torch.randn(5, 1, 8), torch.randn(1, 5, 3, 8)])  # turned; a map
def test_a_second_stream_is_found_in_any_layout(states: Tensor) -> None:
    """In a block's own layout: one that is read in place of its own stream is refused."""
    block, layer, second = nn.Identity(), nn.Linear(8, 2), torch.randn_like(states)
    event = Event(block, (states, second), {"mask": torch.randn(2, 8)}, states)
    hidden = hidden_slot(event, Trace([Event(layer, (states,), {}, states), event]))
    assert hidden.key == 0
    [slot] = beside(event, hidden)
    read = slot.get(event.args, event.kwargs)
    assert slot.key == 1
    assert read.shape == hidden.get(event.args, event.kwargs).shape
    assert torch.equal(slot.put(event.args, event.kwargs, read)[0][1], second)
