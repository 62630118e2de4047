"""Forward passes that begin in the middle: blocks before are taken from a record, blocks after it are run.

A removal in block i changes nothing in front of it, so only the blocks from i on have to run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.structure import Discovered, ModelStructure
from duat_cli.models.holding import holding
from duat_cli.models.instrument.calls import Path, handed, without_cache
from duat_cli.models.instrument.hooks import patched
from duat_cli.models.instrument.rig import OTHER_BLOCKS
from duat_cli.models.sweep.lockstep import Weights
from duat_cli.models.terms.sites import Site, Sites, TermId, by_block, watching

Forward = Callable[[], Tensor]  # one pass of the model, which returns the tensor whose change is of interest
Original = Callable[..., Any]  # a block's own forward
Handler = Callable[[int, BlockParts, Original, Sequence[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class BlockCall:
    """One recorded call of a block. Hidden states are kept once: `before` is the same tensor as the `after` of the call
    in front where nothing came between, and it also stands among the arguments and in `output`."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    output: Any  # the block's output, with `before` in place of the hidden states
    before: Tensor  # the hidden states it took, (1, N, M)
    after: Tensor  # the hidden states it gave, (1, N, M)
    left: Mapping[Path, Tensor]  # tensors in its mappings after the call

    @property
    def handed(self) -> dict[Path, Tensor]:
        """The tensors in the mappings that it was given."""
        return handed(self.args, self.kwargs)


@dataclass(frozen=True)
class Recorded:
    """One pass: its output, and every block call in order."""

    output: Tensor
    calls: list[BlockCall]

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self.calls[0].before.shape[1]


class Calls(Protocol):
    """Recorded block calls by number."""

    def __getitem__(self, number: int, /) -> BlockCall: ...


Means = Mapping[tuple[int, Site | None], Tensor]  # (block call, site; None: the whole block) -> mean value, (width,)


@dataclass(frozen=True)
class Removal:
    """The terms removed from one block call: a factor 0 (removed) or 1 (kept) for every term of some sites."""

    masks: Mapping[Site, Tensor]  # (site.count,)
    whole: bool = False  # whether the whole block is removed: its output is then its input
    means: Means | None = None  # values in place of the removed ones; None: zero
    number: int = 0  # number of the block call, to find its means
    beside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Context around the block call, in a pass of one row: removes terms that have no site."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context around the block call in which the terms are removed."""
        with watching(list(self.masks), self.edit), self.beside():
            yield

    def edit(self, site: Site, value: Tensor, index: Tensor | None) -> Tensor:
        keep = site.spread(self.masks[site].to(value), value, index)
        kept = value * keep
        return kept if self.means is None else kept + (1 - keep) * self.means[self.number, site].to(value)

    def bridge(self, before: Tensor) -> Tensor:
        """The output of the block when all of it is removed."""
        return before if self.means is None else before + self.means[self.number, None].to(before)


Removals = Mapping[int, Removal]  # by block call


def removals(structure: ModelStructure, sites: Sites, terms: Iterable[TermId], means: Means | None = None) -> Removals:
    """The removals, by block call, that take out all these terms together."""
    found = {}
    for block, here in sorted(by_block(terms).items()):
        places: dict[Site, list[int]] = defaultdict(list)
        for term in here:
            if term.kind != "block":
                site, place = sites[structure.calls[block]].find(term)
                places[site].append(place)
        masks = {site: torch.ones(site.count) for site in places}
        for site, mask in masks.items():
            mask[places[site]] = 0
        found[block] = Removal(masks, any(term.kind == "block" for term in here), means, block)
    return found


class BlockPass:
    """A pass in which every block call goes through `handle(call number, parts, own forward, args, kwargs)`.

    gradient: whether a graph is recorded. weights: those that are read block by block, if they are; nothing is then
    read for the first `start` block calls, whose own forward `handle` must not call.
    """

    def __init__(
        self,
        blocks: Discovered,
        forward: Forward,
        handle: Handler,
        *,
        gradient: bool = False,
        weights: Weights | None = None,
        start: int = 0,
    ) -> None:
        self._blocks, self._forward, self._handle, self._gradient = blocks, forward, handle, gradient
        self._weights, self._start, self._number = weights, start, 0
        self._towers = itertools.count()  # numbers of the calls of towers
        self._order = blocks.calls if isinstance(blocks, ModelStructure) else None  # None: not all blocks are known yet

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._gradient))
            modules = self._blocks.elements()
            for module in modules:
                stack.enter_context(patched(module, self._numbered))
            if self._weights is None and isinstance(self._blocks, ModelStructure):
                # of passes side by side, one that knows its tower's output would run ahead of the others
                stack.enter_context(self._blocks.towers.active(self._towers))
            if self._weights is not None and self._number < self._start:
                stack.enter_context(self._passing(self._weights, set(modules)))
            yield

    def run(self) -> None:
        """Runs the pass and sets `output`. Raises UnsupportedModelError where other blocks run, or in another order."""
        self.output = self._forward()
        if self._order is not None and self._number < len(self._order):
            raise UnsupportedModelError(OTHER_BLOCKS)

    def _numbered(self, module: nn.Module, original: Original, args: Any, kwargs: Any) -> Any:
        number, self._number = self._number, self._number + 1
        if self._order is not None and self._order[number : number + 1] != (module,):
            raise UnsupportedModelError(OTHER_BLOCKS)
        return self._handle(number, self._blocks.parts_of(module), original, args, kwargs)

    @contextlib.contextmanager
    def _passing(self, weights: Weights, modules: set[nn.Module]) -> Iterator[None]:
        """While active, the pass goes through the doors of the first blocks without asking for their pages."""
        ask = weights.at_door

        def at_door(page: Any) -> None:
            if self._number >= self._start or modules.isdisjoint(page.doors):
                ask(page)

        with holding(weights, at_door=at_door):
            yield


def run_alone(one: BlockPass) -> Tensor:
    """The output of a pass that is run alone."""
    with one.active():
        one.run()
    return one.output


class RecordingPass(BlockPass):
    """A pass that keeps every block call in `calls`."""

    def __init__(
        self,
        blocks: Discovered,
        forward: Forward,
        sites: Sites | None = None,
        see: Callable[[int, Site, Tensor], None] | None = None,
        gone: Removals | None = None,
    ) -> None:
        """see(block call, site, tensor): called at every site. gone: the removals under which the pass runs."""
        super().__init__(blocks, forward, self._keep)
        self.calls: list[BlockCall] = []
        self._sites, self._see, self._gone = sites, see, gone

    @property
    def recorded(self) -> Recorded:
        """The record, once the pass has run."""
        return Recorded(self.output, self.calls)

    def _keep(self, number: int, parts: BlockParts, original: Original, args: Any, kwargs: Any) -> Any:
        before, see = _kept(parts.hidden.get(args, kwargs), self.calls), self._see
        given = parts.hidden.put(*without_cache(args, kwargs), before)  # copied before the block puts tensors there
        sites = () if self._sites is None or see is None else self._sites[parts.module].sites

        def show(site: Site, value: Tensor, index: Tensor | None) -> None:
            assert see is not None
            see(number, site, value)

        with without_terms(self._gone, number) as bridge, watching(sites, show):
            output = original(*args, **kwargs)
        if bridge is not None:
            output = parts.hidden.exchanged(output, before, bridge(before.clone()))
        after = parts.hidden.found(output, before).clone()
        kept = parts.hidden.exchanged(output, before, before)
        self.calls.append(BlockCall(*given, kept, before, after, handed(args, kwargs)))
        return output


def _kept(hidden: Tensor, calls: Sequence[BlockCall]) -> Tensor:
    """The hidden states in front of the next call: those kept after the last one, if equal, else a copy, because blocks
    may write to them."""
    if calls:
        known = calls[-1].after
        if (known.dtype, known.device) == (hidden.dtype, hidden.device) and torch.equal(known, hidden):
            return known
    return hidden.clone()


def record(
    structure: ModelStructure,
    forward: Forward,
    sites: Sites | None = None,
    see: Callable[[int, Site, Tensor], None] | None = None,
    gone: Removals | None = None,
) -> Recorded:
    """Runs `forward` and keeps every block's input and output. see, gone: as in `RecordingPass`."""
    one = RecordingPass(structure, forward, sites, see, gone)
    run_alone(one)
    return one.recorded


@contextlib.contextmanager
def without_terms(gone: Removals | None, number: int) -> Iterator[Callable[[Tensor], Tensor] | None]:
    """The context around a block call in which its removed terms are missing. Where all of the block is removed, it
    yields the function from the block's input to its output, otherwise None."""
    removal = None if gone is None else gone.get(number)
    if removal is None:
        yield None
        return
    with removal.active():
        yield removal.bridge if removal.whole else None


class Leading:
    """A recording pass for passes that follow it block by block. It keeps only what they need: the calls since it was
    last taken up."""

    def __init__(self, blocks: Discovered, forward: Forward, tokens: int) -> None:
        """tokens: number of tokens of the prompt."""
        self._first, self.tokens = 0, tokens
        self._pass = RecordingPass(blocks, forward)

    def __getitem__(self, number: int) -> BlockCall:
        assert number >= self._first, f"block call {number} is asked for behind block call {self._first}"
        return self._pass.calls[number - self._first]

    @property
    def calls(self) -> Calls:
        """The calls, as in `Recorded`."""
        return self

    @property
    def output(self) -> Tensor:
        """The output, once the pass has run."""
        return self._pass.output

    def active(self) -> contextlib.AbstractContextManager[None]:
        self._first += len(self._pass.calls)
        self._pass.calls.clear()
        return self._pass.active()

    def run(self) -> None:
        """Runs the pass."""
        self._pass.run()

    def forget(self) -> None:
        """Drops the output once it is not needed any more: logits are the largest tensor of a pass."""
        del self._pass.output


@dataclass(frozen=True)
class Behind:
    """The code behind the last block in a recorded pass. weights: as in `BlockPass`."""

    structure: ModelStructure
    forward: Forward
    recorded: Recorded
    weights: Weights | None = None

    @property
    def hidden(self) -> Tensor:
        """The last block's output in that pass, (1, N, M)."""
        return self.recorded.calls[-1].after

    def on(self, hidden: Tensor, *, gradient: bool = True) -> BlockPass:
        """The pass with `hidden` in place of the last block's output. gradient: whether a graph is recorded."""
        calls, count = self.recorded.calls, len(self.recorded.calls)

        def handle(number: int, parts: BlockParts, _own: Original, _args: Sequence[Any], _kwargs: Any) -> Any:
            call = calls[number]
            return parts.hidden.exchanged(call.output, call.before, hidden if number == count - 1 else call.after)

        return BlockPass(self.structure, self.forward, handle, gradient=gradient, weights=self.weights, start=count)
