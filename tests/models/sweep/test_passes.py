"""Passes that begin in the middle against whole passes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from removal import TYPES, forward_of, prepared, scaled, untouched
from torch import Tensor, nn

from duat_cli.models.discovery.structure import discover
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.sweep.passes import Behind, Removal, record, removals, run_alone
from duat_cli.models.sweep.rows import run_without
from duat_cli.models.terms.sites import TermId, find_sites
from duat_cli.zoo import tiny


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("model_type", TYPES)
def test_a_recorded_pass_is_the_pass(model_type: str) -> None:
    model, structure, ids = prepared(model_type)
    forward = forward_of(structure, ids)
    with torch.no_grad():
        own = forward()
    recorded = record(structure, forward)
    assert torch.equal(recorded.output, own)
    assert torch.equal(run_without(structure, forward, recorded, {}), own)
    behind = Behind(structure, forward, recorded)
    for before, after in zip(recorded.calls, recorded.calls[1:], strict=False):
        assert torch.equal(before.after, after.before)
    assert torch.equal(run_alone(behind.on(behind.hidden)), own)
    assert untouched(model)


@pytest.mark.parametrize("model_type", TYPES)
def test_hidden_states_are_kept_once_a_block(model_type: str) -> None:
    _, structure, ids = prepared(model_type)
    calls = record(structure, forward_of(structure, ids)).calls
    kept: set[int] = set()
    for call, proved in zip(calls, map(structure.block, range(len(calls))), strict=True):
        given = proved.parts.hidden.get(call.args, call.kwargs)
        tensors = given, proved.parts.hidden.found(call.output, given), call.before, call.after
        kept |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(kept) == len(calls) + 1


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("block", [1, 2])
def test_blocks_in_front_of_a_removal_need_not_run(model_type: str, block: int) -> None:
    model, structure, ids = prepared(model_type)
    forward = forward_of(structure, ids)
    sites = find_sites(structure)
    recorded = record(structure, forward)
    site = sites[structure.calls[block]].of("ffn")[0]
    removals = {block: Removal({site: torch.zeros(1)})}
    skipping = run_without(structure, forward, recorded, removals)
    # with every block run: a removal of nothing from the first block comes first
    whole = run_without(structure, forward, recorded, {0: Removal({}), **removals})
    assert torch.equal(skipping, whole)
    assert not torch.equal(whole, recorded.output)
    assert torch.equal(record(structure, forward).output, recorded.output)
    assert untouched(model)


@pytest.mark.parametrize("model_type", ["llama", "bert", "falcon"])
def test_a_removed_block_is_its_input(model_type: str) -> None:
    _, structure, ids = prepared(model_type)
    forward = forward_of(structure, ids)
    recorded = record(structure, forward)
    last = len(structure.calls) - 1
    output = run_without(structure, forward, recorded, {last: Removal({}, whole=True)})
    assert torch.equal(output, run_alone(Behind(structure, forward, recorded).on(recorded.calls[last].before)))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("mean", [None, 2.0])
def test_a_block_that_is_removed_whole_does_not_run(model_type: str, mean: float | None) -> None:
    """A recording pass runs it all the same, since it keeps what the block gave, and gives the same output."""
    model, structure, ids = prepared(model_type)
    forward = forward_of(structure, ids)
    recorded = record(structure, forward)
    means = None if mean is None else {(1, None): torch.full((structure.hidden_size,), mean)}
    gone = {1: Removal({}, whole=True, means=means, number=1)}
    ran: list[nn.Module] = []
    with hooked(list(structure.calls[1].children()), lambda module, _args, _kwargs: ran.append(module)):
        output = run_without(structure, forward, recorded, gone)
        assert not ran
        expected = record(structure, forward, gone=gone).output
        assert ran
    assert torch.equal(output, expected)
    assert not torch.equal(output, recorded.output)
    assert untouched(model)


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_removal_does_to_what_is_handed_on(nested: bool) -> None:
    """Each block adds some of what the one in front put into a mapping, or into one within it."""
    model = tiny.tiny_model("llama")
    layers = model.model.layers
    shared: dict[str, Any] = {}

    def begin(_module: nn.Module, _args: Any) -> None:
        nonlocal shared
        shared = {"kept": {}}

    def run(own: Any, number: int, hidden: Tensor, *args: Any, shared: dict[str, Any], **kwargs: Any) -> Tensor:
        held = shared["kept"] if nested else shared
        output: Tensor = own(hidden + 0.3 * held[number - 1] if number else hidden, *args, **kwargs)
        held[number] = output * 0.5
        return output

    model.model.register_forward_pre_hook(begin)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _m, a, k: (a, {**k, "shared": shared}), with_kwargs=True)
        layer.forward = functools.partial(run, layer.forward, number)
    structure, ids = discover(model), torch.tensor([[40, 41, 42, 43]])
    sites, forward = find_sites(structure), forward_of(structure, ids)
    recorded = record(structure, forward)
    for number, layer in enumerate(layers):
        gone = removals(structure, sites, [TermId("neuron", number, k) for k in range(4)])
        output, down = run_without(structure, forward, recorded, gone), layer.mlp.down_proj
        with torch.no_grad():
            kept = down.weight.clone()
            down.weight[:, :4] = 0
            zeroed = forward()
            down.weight.copy_(kept)
        assert torch.allclose(output, zeroed, rtol=1e-5, atol=1e-6)
        assert (zeroed - recorded.output).norm() > 1e-3 * recorded.output.norm()


def test_what_stands_in_for_a_removed_term() -> None:
    structure = prepared("llama")[1]
    sites = find_sites(structure)
    site = sites[structure.calls[1]].of("neuron")[0]
    mean = torch.arange(site.count, dtype=torch.float32)
    mask = torch.ones(site.count)
    mask[3] = 0
    removal = Removal({site: mask}, means={(1, site): mean, (1, None): torch.full((32,), 2.0)}, number=1)
    value = torch.randn(1, 5, site.count)
    edited = removal.edit(site, value, None)
    assert torch.equal(edited[..., 3], torch.full((1, 5), 3.0))
    assert torch.equal(edited[..., 4:], value[..., 4:])
    assert torch.equal(removal.bridge(torch.ones(1, 5, 32)), torch.full((1, 5, 32), 3.0))


@pytest.mark.parametrize("model_type", ["llama", "bert", "falcon"])
def test_an_exception_leaves_nothing_behind(model_type: str) -> None:
    model, structure, ids = prepared(model_type)
    sites = find_sites(structure)
    forward = forward_of(structure, ids)
    recorded = record(structure, forward)

    def stop(*_: Any) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        record(structure, forward, sites, stop)
    assert untouched(model)
    site = sites[structure.calls[1]].of("head")[0]
    with pytest.raises(RuntimeError):
        run_without(structure, forward, recorded, {1: Removal({site: torch.ones(site.count + 1)})})
    assert untouched(model)
    assert torch.equal(record(structure, forward).output, recorded.output)


def test_scaling_by_hand_is_removal() -> None:
    """The test's own way to scale a term agrees with the package's way to remove it."""
    model, structure, ids = prepared("llama")
    sites = find_sites(structure)
    forward = forward_of(structure, ids)
    recorded = record(structure, forward)
    for term in (TermId("head", 1, 2), TermId("block", 1)):
        site_masks = {}
        if term.index is not None:
            site, place = sites[structure.calls[1]].find(term)
            mask = torch.ones(site.count)
            mask[place] = 0
            site_masks = {site: mask}
        removed = run_without(structure, forward, recorded, {1: Removal(site_masks, term.index is None)})
        assert torch.allclose(removed, scaled(structure, sites, forward, term, 0.0), atol=1e-6)
    assert untouched(model)
