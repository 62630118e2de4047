"""Gradients of many probes of the output, carried back block by block.

Each block is recomputed from its recorded input, so that only one block's intermediate tensors are alive at a time. All
probes go through its graph at once.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.compat.torch import uncheckpointed
from duat_cli.compat.transformers import stated
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.budgets import GRADIENT_BYTES, gradient_elements
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.calls import Path, handed, with_handed
from duat_cli.models.instrument.functions.activations import SlopesOnce
from duat_cli.models.sweep.detached import Again, without_gradient
from duat_cli.models.sweep.lockstep import Weights
from duat_cli.models.sweep.passes import Behind, BlockCall, Forward, Recorded, Removals, without_terms
from duat_cli.models.terms.sites import Edit, Site, Sites, watching


@dataclass(frozen=True)
class SiteCall:
    """The tensor at one call of a site, such as activations of neurons or routing weights of experts."""

    site: Site
    value: Tensor
    index: Tensor | None  # the expert of every routing weight


@dataclass(frozen=True)
class SiteGradient(SiteCall):
    """One call of a site, with the gradient of every probe at its tensor."""

    gradient: Tensor  # (probes, *value.shape)


@dataclass(frozen=True)
class BlockGradient:
    """One block call: the gradient of every probe at its output, and at its sites."""

    number: int
    call: BlockCall
    probes: slice  # the numbers of these probes among all
    after: Tensor  # gradients at its output, (probes, 1, N, M)
    sites: list[SiteGradient]


class Backward:
    """The gradients of ⟨probe, output⟩ for every probe, from the last block to the first.

    It is itself a pass, which takes the probes through the code behind the last block; `through` then takes them
    through one block after the other, from the last to the first.
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
        """probes: makes the probes, (probes, *output.shape), when they are needed, some at a time. weights: as in
        `BlockPass`. gone: the removals under which the pass was recorded."""
        self._structure, self._sites, self._recorded, self._probes = structure, sites, recorded, probes
        self._gone, self._handed = gone, handed_on(recorded.calls)
        self._heads = (
            stated(structure.stack.config, "num_attention_heads") or 1
        )  # the matrices of its heads have gradients in any case
        behind = Behind(structure, forward, recorded, weights)
        self._hidden = behind.hidden.detach().clone().requires_grad_()
        self._end = behind.on(self._hidden)
        self._at_output = torch.empty(0)  # gradients at the output of the next block, (probes, 1, N, M)
        self._at_handed: dict[Path, Tensor] = {}  # gradients at tensors that it hands on, (probes, *the tensor's shape)

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self._end.active()

    def run(self) -> None:
        """Takes the probes from the output to the last block."""
        self._end.run()
        if not self._end.output.requires_grad:
            raise without_gradient("the last block, or what follows it")
        found = list[Tensor]()
        for some in self._probes():
            found += pulled(self._end.output, [self._hidden], some)
            del some  # frees these probes before the next ones are drawn
        self._at_output = torch.cat(found)
        del self._end, self._hidden

    def through(self, number: int) -> Iterator[BlockGradient]:
        """Yields the gradients of the next block, a few probes at a time if those of all would not fit in memory."""
        call, parts = self._recorded.calls[number], self._structure.block(number).parts
        captured: list[SiteCall] = []
        blind: list[int] = []  # the captured tensors that depend on nothing, by their graph

        def capture(site: Site, value: Tensor, index: Tensor | None) -> Tensor:
            if not value.requires_grad:
                blind.append(len(captured))
                value = value.detach().requires_grad_()
            captured.append(SiteCall(site, value, index))
            return value.clone()  # the block may write to it in place, which must not change the captured tensor

        run = _Rerun(number, call, parts, self._sites[parts.module].sites, self._handed[number], self._gone)
        with torch.enable_grad(), uncheckpointed(), SlopesOnce():
            after = run(run.read, capture)
        read, handed_on = run.read, [run.left[path] for path in self._at_handed]
        again = Again(run, [x.detach() for x in read], after.detach(), [one.value.detach() for one in captured])
        where = f"block {number} ({parts.name})"
        if not all(tensor.requires_grad for tensor in (after, *handed_on)) or again.any_moves(blind):
            raise without_gradient(where)
        below: list[list[Tensor]] = []
        values = [one.value for one in captured]
        size = _piece(values + read[1:], call.before, self._heads)
        pieces = [each.split(size) for each in (self._at_output, *self._at_handed.values())]
        for place, (piece, *at_handed) in enumerate(zip(*pieces, strict=True)):
            # the gradient at the input of the first block is not needed
            inputs = values + (read if number else [])
            grads = pulled(after, inputs, piece, zip(handed_on, at_handed, strict=True)) if inputs else []
            lost = [k for k, gradient in enumerate(grads) if not gradient.any()]
            if lost and again.moved_by(lost, piece):
                raise without_gradient(where)
            below.append(grads[len(captured) :] if number else [piece])
            found = [
                SiteGradient(one.site, one.value.detach(), one.index, gradient)
                for one, gradient in zip(captured, grads[: len(captured)], strict=True)
            ]
            yield BlockGradient(number, call, slice(place * size, place * size + len(piece)), piece, found)
        self._at_output, *rest = (torch.cat(some) if len(some) > 1 else some[0] for some in zip(*below, strict=True))
        self._at_handed = dict(zip(run.handed, rest, strict=True))


class _Rerun:
    """A recorded block call that can be run again with other inputs."""

    def __init__(
        self,
        number: int,
        call: BlockCall,
        parts: BlockParts,
        watched: Sequence[Site],
        handed: Sequence[Path],
        gone: Removals | None,
    ) -> None:
        """handed: the paths in mappings at which earlier blocks put tensors for this one. gone: as in `Backward`."""
        self._number, self._call, self._parts, self._watched, self._gone = number, call, parts, watched, gone
        self.handed, given = handed, call.handed
        self.read = [t.detach().clone().requires_grad_() for t in (call.before, *(given[path] for path in handed))]
        """The inputs of the call: its hidden states, then the tensors at `handed`."""
        self.left: dict[Path, Tensor] = {}
        """The tensors in the mappings after the last run."""

    def __call__(self, read: Sequence[Tensor], watch: Edit) -> Tensor:
        """The output, (1, N, M), for the inputs `read`. watch: called at its sites, unless all of the block is removed;
        it then runs only for what it hands on."""
        x, *others = (tensor.clone() for tensor in read)  # blocks may write to them
        given = dict(zip(self.handed, others, strict=True))
        args, kwargs = with_handed(self._call.args, self._call.kwargs, given.get)
        args, kwargs = self._parts.hidden.put(args, kwargs, x)
        with without_terms(self._gone, self._number) as bridge, watching(() if bridge else self._watched, watch):
            after = self._parts.hidden.found(self._parts.module(*args, **kwargs), x)
        self.left = handed(args, kwargs)
        return after if bridge is None else bridge(read[0].clone())


def handed_on(calls: Sequence[BlockCall]) -> list[list[Path]]:
    """For each call, the paths in mappings at which it is given tensors that earlier calls put there."""
    found: list[list[Path]] = [[]]
    for front, call in itertools.pairwise(calls):
        made = {path: t for path, t in front.left.items() if path in found[-1] or t is not front.handed.get(path)}
        found.append([path for path, t in call.handed.items() if path in made and torch.equal(t, made[path])])
    return found


def _piece(others: Sequence[Tensor], x: Tensor, heads: int) -> int:
    """How many probes go through a block at once. others: tensors beside the stream that have gradients."""
    elements = gradient_elements(x.shape[2], x.shape[1], heads, sum(tensor.numel() for tensor in others))
    return max(1, GRADIENT_BYTES // (elements * x.element_size()))


def pulled(
    output: Tensor, inputs: list[Tensor], probes: Tensor, others: Iterable[tuple[Tensor, Tensor]] = ()
) -> list[Tensor]:
    """Each probe's gradient at the inputs, (probes, *input.shape); zero where the output does not depend on one.

    others: further outputs, each with the probes' gradients at it.
    """
    outputs, at = zip((output, probes), *others, strict=True)
    if not all(tensor.requires_grad for tensor in outputs):
        raise without_gradient("a layer")

    def pull(*at: Tensor) -> tuple[Tensor, ...]:
        try:
            return torch.autograd.grad(
                outputs, inputs, at, allow_unused=True, materialize_grads=True, retain_graph=True
            )
        except RuntimeError as fault:
            if "modified by an inplace operation" not in str(fault):
                raise
            raise UnsupportedModelError(
                "its own code writes in place to what its gradient is made of, which torch cannot differentiate: let "
                "it write to a copy (y = y * g, not y *= g)"
            ) from fault

    if len(probes) == 1:
        return [gradient[None] for gradient in pull(*(one[0] for one in at))]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return list(torch.func.vmap(pull)(*at))
    except RuntimeError:  # an operation that cannot be batched
        return [torch.stack(column) for column in zip(*map(pull, *at), strict=True)]
