"""Gradients of many probes of the output, carried back block by block.

Each block is recomputed from its recorded input, so that one block's intermediate tensors are alive at a time, and all
probes go through its graph at once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.compat.transformers import stated
from duat_cli.models.budgets import GRADIENT_BYTES, gradient_elements
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.calls import hidden_of
from duat_cli.models.instrument.functions.activations import SlopesOnce
from duat_cli.models.sweep.detached import Again, without_gradient
from duat_cli.models.sweep.lockstep import Weights
from duat_cli.models.sweep.passes import Behind, BlockCall, Forward, Recorded, Removals, without_terms
from duat_cli.models.terms.sites import Edit, Site, Sites, watching


@dataclass(frozen=True)
class SiteGradient:
    """One call of a site: its tensor, and the gradient of every probe to it."""

    site: Site
    value: Tensor
    index: Tensor | None  # the expert of every routing weight
    gradient: Tensor  # (probes, *value.shape)


@dataclass(frozen=True)
class BlockGradient:
    """One block call: the gradient of every probe at its output, and at its sites."""

    number: int
    call: BlockCall
    probes: slice  # which of the probes these are
    after: Tensor  # (probes, 1, N, M)
    sites: list[SiteGradient]


class Backward:
    """The gradients of ⟨probe, output⟩ for every probe, from the last block to the first.

    It is a pass itself, which takes the probes through what follows the last block; `through` then takes them through
    one block after the other, downwards.
    """

    def __init__(
        self,
        structure: ModelStructure,
        sites: Sites,
        forward: Forward,
        recorded: Recorded,
        probes: Callable[[], Iterable[Tensor]],
        weights: Weights | None = None,
        gone: Removals | None = None,
    ) -> None:
        """probes: makes (probes, *output.shape) when they are needed, some at a time. weights: as of `BlockPass`.
        gone: what the pass was recorded without."""
        self._structure, self._sites, self._recorded, self._probes = structure, sites, recorded, probes
        self._gone = gone
        self._heads = (
            stated(structure.stack.config, "num_attention_heads") or 1
        )  # their matrices have gradients in any case
        behind = Behind(structure, forward, recorded, weights)
        self._hidden = behind.hidden.detach().clone().requires_grad_()
        self._end = behind.on(self._hidden)
        self._at_output = torch.empty(0)  # the gradients at the output of the block that is next, (probes, 1, N, M)

    def active(self) -> contextlib.AbstractContextManager[None]:
        """What `run` needs around it."""
        return self._end.active()

    def run(self) -> None:
        """From the output to the last block."""
        self._end.run()
        if not self._end.output.requires_grad:
            raise without_gradient("the last block, or what follows it")
        found = list[Tensor]()
        for some in self._probes():
            found += pulled(self._end.output, [self._hidden], some)
            del some  # before the next ones are drawn
        self._at_output = torch.cat(found)
        del self._end, self._hidden

    def through(self, number: int) -> Iterator[BlockGradient]:
        """The next block, in pieces of some probes if the gradients of all of them would not fit."""
        call = self._recorded.calls[number]
        parts = self._structure.block(number).parts
        x = call.before.detach().clone().requires_grad_()
        captured: list[tuple[Site, Tensor, Tensor | None]] = []
        blind: list[int] = []  # those that depend on nothing, by their graph

        def capture(site: Site, value: Tensor, index: Tensor | None) -> Tensor:
            if not value.requires_grad:
                blind.append(len(captured))
                value = value.detach().requires_grad_()
            captured.append((site, value, index))
            return value.clone()  # what the block does to it in place must not reach the captured tensor

        def run(x: Tensor, watch: Edit) -> Tensor:
            with without_terms(self._gone, number) as bridge:
                if bridge is not None:
                    return bridge(x.clone())
                with watching(self._sites[parts.module].sites, watch):
                    args, kwargs = parts.hidden.put(call.args, call.kwargs, x.clone())  # blocks may write to it
                    return hidden_of(parts.module(*args, **kwargs), x)

        with torch.enable_grad(), SlopesOnce():
            after = run(x, capture)
        again = Again(run, x.detach(), after.detach(), [value.detach() for _, value, _ in captured])
        where = f"block {number} ({parts.name})"
        if not after.requires_grad or again.any_moves(blind):
            raise without_gradient(where)
        below: list[Tensor] = []
        for piece in self._at_output.split(_piece(captured, x, self._heads)):
            # nothing stands in front of the first block
            inputs = [value for _, value, _ in captured] + ([x] if number else [])
            grads = pulled(after, inputs, piece) if inputs else []
            lost = [place for place, gradient in enumerate(grads) if not gradient.any()]
            if lost and again.moved_by(lost, piece):
                raise without_gradient(where)
            first = sum(map(len, below))
            below.append(grads.pop() if number else piece)
            found = [
                SiteGradient(site, value.detach(), index, gradient)
                for (site, value, index), gradient in zip(captured, grads, strict=True)
            ]
            yield BlockGradient(number, call, slice(first, first + len(piece)), piece, found)
        self._at_output = torch.cat(below) if len(below) > 1 else below[0]


def _piece(captured: Sequence[tuple[Site, Tensor, Tensor | None]], x: Tensor, heads: int) -> int:
    """How many probes at once."""
    elements = gradient_elements(x.shape[2], x.shape[1], heads, sum(value.numel() for _, value, _ in captured))
    return max(1, GRADIENT_BYTES // (elements * x.element_size()))


def pulled(output: Tensor, inputs: list[Tensor], probes: Tensor) -> list[Tensor]:
    """Each probe's gradient at the inputs, (probes, *input.shape); zero where the output does not depend on one."""
    if not output.requires_grad:
        raise without_gradient("a layer")

    def pull(probe: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, inputs, probe, allow_unused=True, materialize_grads=True, retain_graph=True)

    if len(probes) == 1:
        return [gradient[None] for gradient in pull(probes[0])]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return list(torch.func.vmap(pull)(probes))
    except RuntimeError:  # an operation that cannot be batched
        return [torch.stack(column) for column in zip(*map(pull, probes), strict=True)]
