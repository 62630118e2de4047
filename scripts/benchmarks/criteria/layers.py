"""The linear layers whose inputs are the neurons of an FFN or the heads of an attention, and what each input holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.kinds import Kind
from duat_cli.models.discovery.structure import ModelStructure, probe_trace
from duat_cli.models.edits.parameters import block_parameters
from duat_cli.models.terms.sites import TermId, find_sites

KINDS: tuple[Kind, ...] = ("neuron", "head")


@dataclass(frozen=True, eq=False)
class Layer:
    """A down projection, or an output projection: y = W x, W (outputs, inputs)."""

    block: int
    kind: Kind
    linear: nn.Linear
    terms: int
    """Neurons or heads; each has `width` neighbouring inputs."""
    parameters: float
    """That leave with one term: its row or rows of the layers in front, its columns of this one; of grouped heads an
    equal share of the keys and values."""

    @property
    def width(self) -> int:
        """Inputs of one term."""
        return self.linear.in_features // self.terms


def layers_of(structure: ModelStructure) -> list[Layer]:
    """Both layers of every block, in order."""
    sites = find_sites(structure)
    written, found = probe_trace(structure.stack), []
    for block, module in enumerate(structure.calls):
        sizes = block_parameters(structure.parts_of(module), sites[module], written)
        for kind in KINDS:
            [site] = sites[module].of(kind)
            assert isinstance(site.module, nn.Linear)
            each = sizes.each[kind]
            assert bool((each == each[0]).all())
            found.append(Layer(block, kind, site.module, site.count, float(each[0])))
    return found


Keep = list[Tensor]  # of every layer, (terms,) bool: which terms stay


def keep_without(layers: Sequence[Layer], terms: Sequence[TermId]) -> Keep:
    """What stays without these terms."""
    place = {(layer.kind, layer.block): number for number, layer in enumerate(layers)}
    keep = [torch.ones(layer.terms, dtype=torch.bool) for layer in layers]
    for term in terms:
        keep[place[term.kind, term.block]][term.index] = False
    return keep


def removed_parameters(layers: Sequence[Layer], keep: Keep) -> float:
    """Parameters of all that does not stay."""
    return sum(float((~stays).sum()) * layer.parameters for layer, stays in zip(layers, keep, strict=True))


@contextlib.contextmanager
def seeing(layers: Sequence[Layer], see: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """While active `see(number of the layer, its input)` may replace what a layer reads."""

    def hook(number: int) -> Callable[..., Any]:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> Any:
            new = see(number, args[0])
            return None if new is None else (new, *args[1:])

        return before

    handles = [layer.linear.register_forward_pre_hook(hook(number)) for number, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without(
    layers: Sequence[Layer], keep: Keep, means: Sequence[Tensor] | None = None
) -> contextlib.AbstractContextManager[None]:
    """While active a layer reads zero in place of what does not stay, or the mean of it, (inputs,) each."""
    masks = [stays.repeat_interleave(layer.width) for layer, stays in zip(layers, keep, strict=True)]

    def see(number: int, value: Tensor) -> Tensor:
        stand_in = torch.zeros(()) if means is None else means[number].to(value)
        return torch.where(masks[number], value, stand_in)

    return seeing(layers, see)


@contextlib.contextmanager
def without_blocks(structure: ModelStructure, gone: Sequence[int]) -> Iterator[None]:
    """While active these blocks give what they are given."""

    def hook(_module: nn.Module, args: Any, output: Any) -> Any:
        return args[0] if isinstance(output, Tensor) else (args[0], *output[1:])

    handles = [structure.calls[number].register_forward_hook(hook) for number in gone]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
