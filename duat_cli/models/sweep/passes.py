"""Forward passes that begin in the middle: what came before is on record, what comes after runs for real.

A removal in block i changes nothing in front of it, so its effect needs the blocks from i on alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.calls import hidden_of, without_cache
from duat_cli.models.instrument.hooks import patched
from duat_cli.models.terms.sites import BlockSites, Site, TermId, watching

Forward = Callable[[], Tensor]  # one pass of the model, to the tensor whose change is of interest
Handler = Callable[[int, Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class BlockCall:
    """One recorded call of a block."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    output: Any
    before: Tensor  # the hidden states it took, (1, N, M)
    after: Tensor  # the hidden states it gave


@dataclass(frozen=True)
class Recorded:
    """One pass: its output, and every block call in order."""

    output: Tensor
    calls: list[BlockCall]


Means = Mapping[tuple[int, Site | None], Tensor]  # (block call, site; None: the whole block) -> mean value, (width,)


@dataclass(frozen=True)
class Removal:
    """What is taken out of one block call: a factor 0 (removed) or 1 (kept) for every term of some sites."""

    masks: Mapping[Site, Tensor]  # (site.count,)
    whole: bool = False  # the block as a whole: its output is its input
    means: Means | None = None  # what stands in for what is removed; None: zero
    number: int = 0  # of the block call, to find its means

    def edit(self, site: Site, value: Tensor, index: Tensor | None) -> Tensor:
        keep = site.spread(self.masks[site].to(value), value, index)
        kept = value * keep
        return kept if self.means is None else kept + (1 - keep) * self.means[self.number, site].to(value)

    def bridge(self, before: Tensor) -> Tensor:
        """The output of a block that is gone."""
        return before if self.means is None else before + self.means[self.number, None].to(before)


Removals = Mapping[int, Removal]  # by block call


def removals(
    structure: ModelStructure,
    sites: Mapping[nn.Module, BlockSites],
    terms: Iterable[TermId],
    means: Means | None = None,
) -> Removals:
    """What to take out of which block call to remove all these terms together."""
    places: dict[int, dict[Site, list[int]]] = defaultdict(lambda: defaultdict(list))
    whole: set[int] = set()
    for term in terms:
        if term.kind == "block":
            whole.add(term.block)
            continue
        site, place = sites[structure.calls[term.block]].find(term)
        places[term.block][site].append(place)
    found = {}
    for block in sorted(whole | set(places)):
        masks = {site: torch.ones(site.count) for site in places[block]}
        for site, mask in masks.items():
            mask[places[block][site]] = 0
        found[block] = Removal(masks, block in whole, means, block)
    return found


def record(
    structure: ModelStructure,
    forward: Forward,
    sites: Mapping[nn.Module, BlockSites] | None = None,
    see: Callable[[int, Site, Tensor], None] | None = None,
) -> Recorded:
    """Run `forward` and keep every block's input and output; `see(block call, site, tensor)` is shown every site."""
    calls: list[BlockCall] = []

    def handle(number: int, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        parts = structure.block(number).parts
        before = parts.hidden.get(args, kwargs).clone()

        def show(site: Site, value: Tensor, index: Tensor | None) -> None:
            assert see is not None
            see(number, site, value)

        with watching(sites[parts.module].sites if sites is not None and see is not None else (), show):
            output = original(*args, **kwargs)
        plain = without_cache(args), dict(zip(kwargs, without_cache(kwargs.values()), strict=True))
        calls.append(BlockCall(*plain, output, before, hidden_of(output, before).clone()))
        return output

    with torch.no_grad(), _block_calls(structure, handle):
        output = forward()
    return Recorded(output, calls)


def prove_chained(structure: ModelStructure, forward: Forward) -> None:
    """UnsupportedModelError if a block reads more of the blocks in front of it than their hidden states.

    Keys shared between layers are such a case: a gradient carried back block by block would miss that way.
    """
    first: list[list[Tensor]] = []
    second: list[list[Tensor]] = []

    def handle_into(seen: list[list[Tensor]], shift: float) -> Handler:
        def handle(number: int, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            hidden = structure.block(number).parts.hidden.get(args, kwargs)
            seen.append([t.clone() for t in _tensors((list(args), kwargs)) if t is not hidden])
            before = hidden.clone()
            output = original(*args, **kwargs)
            after = hidden_of(output, before)
            return with_hidden(output, before, after + shift * after.std() * torch.ones_like(after).cumsum(-1).sin())

        return handle

    with torch.no_grad():
        for seen, shift in ((first, 0.0), (second, 0.1)):
            with _block_calls(structure, handle_into(seen, shift)):
                forward()
    for number, (before, after) in enumerate(zip(first, second, strict=True)):
        if len(before) != len(after) or not all(map(torch.equal, before, after)):
            name = structure.block(number).parts.name
            raise UnsupportedModelError(
                f"{name} reads more of the blocks in front of it than their hidden states (shared keys, perhaps), "
                "so what a removal does to it cannot be followed"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of numbers in nested lists, tuples and dicts; chosen indices and masks have no gradient."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def run_without(structure: ModelStructure, forward: Forward, recorded: Recorded, gone: Removals) -> Tensor:
    """The pass once more with `gone` taken out; blocks before the first are not run again."""
    start = min(gone, default=0)

    def handle(number: int, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if number < start:
            call = recorded.calls[number]
            return with_hidden(call.output, call.before, call.after.clone())
        removal = gone.get(number)
        if removal is None:
            return original(*args, **kwargs)
        before = structure.block(number).parts.hidden.get(args, kwargs)
        before = before.clone() if removal.whole else before
        with watching(list(removal.masks), removal.edit):
            output = original(*args, **kwargs)
        return with_hidden(output, before, removal.bridge(before)) if removal.whole else output

    with torch.no_grad(), _block_calls(structure, handle):
        return forward()


def run_from(structure: ModelStructure, forward: Forward, recorded: Recorded, hidden: Tensor) -> Tensor:
    """What follows the last block, on `hidden` in place of its output; with a graph if grad is enabled."""
    last = len(recorded.calls) - 1

    def handle(number: int, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = recorded.calls[number]
        return with_hidden(call.output, call.before, hidden if number == last else call.after)

    with _block_calls(structure, handle):
        return forward()


def with_hidden(output: Any, like: Tensor, hidden: Tensor) -> Any:
    """A block's output with its hidden states replaced."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, dict):
        key = next(k for k, v in output.items() if isinstance(v, Tensor) and v.shape == like.shape)
        return type(output)(**{**output, key: hidden})
    place = next(k for k, v in enumerate(output) if isinstance(v, Tensor) and v.shape == like.shape)
    return type(output)([*output[:place], hidden, *output[place + 1 :]])


@contextlib.contextmanager
def _block_calls(structure: ModelStructure, handle: Handler) -> Iterator[None]:
    """While active, every block call goes through `handle(call number, the block's own forward, args, kwargs)`."""
    numbers = itertools.count()

    def numbered(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: handle(next(numbers), original, args, kwargs)

    with contextlib.ExitStack() as stack:
        for block in structure.blocks:
            stack.enter_context(patched(block.parts.module, numbered))
        yield
