"""Gradients block by block against those of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import single_model, token_ids
from removal import TYPES, forward_of, prepared, untouched
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import ModelStructure, discover
from duat_cli.models.sweep import gradients
from duat_cli.models.sweep.gradients import Backward, BlockGradient, handed_on
from duat_cli.models.sweep.lockstep import one_by_one
from duat_cli.models.sweep.passes import Forward, Recorded, record
from duat_cli.models.terms.sites import find_sites


def walked(structure: ModelStructure, forward: Forward, recorded: Recorded, probes: Tensor) -> Iterator[BlockGradient]:
    """All blocks, from the last."""
    walk = Backward(structure, find_sites(structure), forward, recorded, lambda: [probes])
    one_by_one([walk])
    for number in reversed(range(len(recorded.calls))):
        yield from walk.through(number)


@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_are_those_of_the_whole_model(model_type: str) -> None:
    """At every block's output, against autograd through the model itself from that block's output."""
    _, structure, ids = prepared(model_type)
    forward = forward_of(structure, ids)
    recorded = record(structure, forward)
    generator = torch.Generator().manual_seed(3)
    probes = torch.randn(3, *recorded.output.shape, generator=generator)
    found = {b.number: b.after for b in walked(structure, forward, recorded, probes)}
    assert list(found) == list(range(len(structure.calls)))[::-1]
    for number, got in found.items():
        leaf = recorded.calls[number].after.clone().requires_grad_()
        with torch.enable_grad():
            output = continued(structure, forward, recorded, number, leaf)
            want = torch.stack([torch.autograd.grad(output, leaf, p, retain_graph=True)[0] for p in probes])
        assert (got - want).norm() <= 1e-4 * want.norm(), number


def continued(
    structure: ModelStructure, forward: Callable[[], Tensor], recorded: Any, number: int, leaf: Tensor
) -> Any:
    """The model's own pass with `leaf` in place of what block call `number` puts out."""
    count = 0

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal count
        count += 1
        slot = structure.block(number).parts.hidden
        return slot.exchanged(output, leaf, leaf * 1.0) if count == number + 1 else None

    handles = [module.register_forward_hook(replace) for module in dict.fromkeys(structure.calls)]
    try:
        return forward()
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("first", [0, 1])
def test_what_the_model_itself_gives_in_a_mapping_has_no_gradient(first: int) -> None:
    """A constant of each block is not handed on, whether the first block has one or not."""
    model = single_model("llama")
    structure = discover(model)
    forward = forward_of(structure, token_ids(structure.stack))
    plain = record(structure, forward)
    for number, layer in enumerate(structure.calls):
        given = {"constant": torch.full((1, 4), float(number))} if number >= first else {}
        layer.register_forward_pre_hook(lambda _m, a, k, given=given: (a, {**k, "shared": given}), with_kwargs=True)
    recorded = record(structure, forward)
    assert handed_on(recorded.calls) == [[]] * len(structure.calls)
    probes = torch.randn(2, *recorded.output.shape, generator=torch.Generator().manual_seed(3))
    found, want = ([b.after for b in walked(structure, forward, one, probes)] for one in (recorded, plain))
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "falcon"])
def test_the_size_of_a_piece_changes_nothing(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, structure, ids = prepared(model_type)
    forward = forward_of(structure, ids)
    recorded = record(structure, forward)
    probes = torch.randn(5, *recorded.output.shape, generator=torch.Generator().manual_seed(3))

    def walk() -> dict[tuple[int, int, int], Tensor]:
        found: dict[tuple[int, int, int], Tensor] = {}
        for block in walked(structure, forward, recorded, probes):
            for k, at in enumerate(block.sites):
                for row, gradient in zip(range(block.probes.start, block.probes.stop), at.gradient, strict=True):
                    found[block.number, k, row] = gradient.clone()
        return found

    whole = walk()
    monkeypatch.setattr(gradients, "GRADIENT_BYTES", 1)
    single = walk()
    assert whole.keys() == single.keys()
    assert {row for _, _, row in whole} == set(range(5))
    for key, gradient in whole.items():
        assert (gradient - single[key]).norm() <= 1e-5 * gradient.norm() + 1e-9, key


@pytest.mark.parametrize("model_type", ["llama", "bert", "falcon"])
def test_a_walk_cut_short_leaves_nothing_behind(model_type: str) -> None:
    model, structure, ids = prepared(model_type)
    forward = forward_of(structure, ids)
    recorded = record(structure, forward)
    probes = torch.randn(2, *recorded.output.shape)
    walk = walked(structure, forward, recorded, probes)
    next(walk)
    assert untouched(model)
    walk.close()
    assert untouched(model)
    assert torch.equal(record(structure, forward).output, recorded.output)


@pytest.mark.parametrize("probes", [1, 3])
def test_what_torch_cannot_differentiate_is_refused(probes: int) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()  # whose gradient is made of what it gave
    with pytest.raises(UnsupportedModelError, match="writes in place to what its gradient is made of"):
        gradients.pulled(y.mul_(2.0), [x], torch.ones(probes, 2))


def test_what_cannot_be_batched_is_pulled_one_by_one() -> None:
    class Numpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return torch.from_numpy(grads[0].numpy() * 3)

    x, unused = torch.randn(2, 5).requires_grad_(), torch.randn(4).requires_grad_()
    probes = torch.randn(3, 2, 5)
    got, none = gradients.pulled(Numpy.apply(x), [x, unused], probes)
    assert torch.allclose(got, 3 * probes)
    assert torch.equal(none, torch.zeros(3, 4))
