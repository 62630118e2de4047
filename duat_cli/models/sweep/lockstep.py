"""Several passes of a model side by side: for each block, all passes go through it before the next block is read.

Each pass runs in a greenlet of its own, which is left in front of a module whose weights are not in memory. Once all
passes wait there, the weights are read, and each pass goes on to the next such module. Every pass runs the model's own
forward, so nothing is assumed about the code between blocks. Where all weights are in memory no pass is ever left, and
they run one after the other.

Greenlets share one thread and with it torch's modes. A pass therefore enters its context (`active`) each time it is
taken up, and exits it each time it is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from duat_cli.compat.libc import Holes
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, probe_inputs
from duat_cli.models.discovery.structure import ModelStructure, probe_trace, run_stack
from duat_cli.models.holding import holding
from duat_cli.models.instrument.hooks import ExchangedError
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.terms.branches import BlockBranches, block_branches
from duat_cli.models.terms.sites import BlockSites, block_sites

BETWEEN = 8  # passes through a block after which free memory is returned: waiting passes leave holes, 0.1 GB of 0.8


class Pass(Protocol):
    """A run of the model that can be left between blocks."""

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """The context that `run` needs around it."""
        ...

    def run(self) -> None: ...


class Weights(Protocol):
    """Weights of which one page at a time is in memory."""

    at_door: Callable[[Any], None]  # called in front of a module without its page
    turning: Callable[[Any], None]  # called before another page is read
    held: Any

    def hold(self, page: Any) -> None: ...

    def release(self) -> None: ...

    def depth(self, page: Any) -> int: ...

    def bring(self, module: nn.Module) -> None:
        """Reads the weights of a block into memory, outside of any call of it."""
        ...


class Call:
    """A pass that makes one call and keeps its output."""

    def __init__(
        self, call: Callable[[], Any], around: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad
    ) -> None:
        self._call, self._around = call, around
        self.output: Any = None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return self._around()

    def run(self) -> None:
        self.output = self._call()


class Watched(Call):
    """A call whose hooks look at no other pass: `on` tells them whether this one runs."""

    on = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with holding(self, on=True), super().active():
            yield


class Visit:
    """A pass that goes from block to block and looks at the weights."""

    def __init__(self, blocks: Sequence[nn.Module], look: Callable[[int], None], weights: Weights | None) -> None:
        """look(number): called for every block while its weights are in memory. weights: None if all are."""
        self._blocks, self._look, self._weights = blocks, look, weights

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self) -> None:
        for number, module in enumerate(self._blocks):
            if self._weights is not None:
                self._weights.bring(module)
            self._look(number)


class Guest:
    """Work that goes through a model together with its discovery. Where weights are read block by block, it runs beside
    the discovery, anew for every attempt; otherwise after it. This base class runs passes and does nothing at
    blocks."""

    def __init__(self, passes: Sequence[Pass] = ()) -> None:
        """passes: they go through each block once it is proved."""
        self.passes = passes

    def proved(self, parts: BlockParts, written: Trace) -> None:
        """Called after the proof of every block, under the proof's instruments, with the block's weights in memory.

        written: the trace of the block.
        """

    def probe(self, run: BlockRun) -> None:
        """Called after every block call of the probe prompt."""


class Placing(Guest):
    """Finds the sites of every block, and where its branches meet the stream."""

    def __init__(self, passes: Sequence[Pass] = ()) -> None:
        super().__init__(passes)
        self.sites: dict[nn.Module, BlockSites] = {}
        self.branches: dict[nn.Module, BlockBranches] = {}

    def proved(self, parts: BlockParts, written: Trace) -> None:
        self.sites[parts.module] = block_sites(parts, written)

    def probe(self, run: BlockRun) -> None:
        if run.parts.module not in self.branches:
            self.branches[run.parts.module] = block_branches(run, self.sites[run.parts.module])


G = TypeVar("G", bound=Guest)


def shown(guest: G, structure: ModelStructure, like: Mapping[str, Tensor] | None) -> G:
    """The guest, after its work on a finished discovery with all weights in memory. like: as in `discover`."""
    given = probe_inputs(structure.stack, like, DISCOVERY_TOKENS)
    written = probe_trace(structure.stack, given, structure.part)
    for block in structure.blocks:
        guest.proved(block.parts, written)
    del written  # it holds the outputs of all modules
    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, given), guest.probe)
    one_by_one(guest.passes)
    return guest


def one_by_one(passes: Sequence[Pass]) -> None:
    """Runs passes one after the other, with all weights in memory."""
    for each in passes:
        with each.active():
            each.run()


def side_by_side(
    weights: Weights, first: Pass, others: Callable[[], Sequence[Pass] | None], left: Callable[[Any], None]
) -> None:
    """Runs `first` and the others so that every page is read once, in the order in which `first` asks for them.

    others: returns the passes that follow it, in order, or None while it is too early to tell; called between pages.
    left(page): called when all passes have gone through a page, before it is given up.
    """
    scheduler = _Scheduler(weights)
    try:
        with holding(weights, at_door=scheduler.ask):
            scheduler.run(first, others, left)
    finally:
        scheduler.stop()


def together(passes: Sequence[Pass], weights: Weights | None) -> None:
    """Runs passes one after the other where all weights are in memory (`weights` is None), otherwise side by side.

    The first pass goes through every block that any of them goes through.
    """
    if weights is None:
        one_by_one(passes)
    elif passes:
        weights.release()  # a pass that finds its page in memory would run ahead of those in front of it
        side_by_side(weights, passes[0], lambda: passes[1:], lambda _page: None)


def forwards(
    weights: Weights | None,
    calls: Sequence[Callable[[], Any]],
    around: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad,
) -> list[Any]:
    """The outputs of these calls of a model. weights: those that are read block by block, for all calls at once; None
    where all are in memory. around: the context of each call whenever it is taken up."""
    passes = [Call(call, around) for call in calls]
    try:
        together(passes, weights)
    except ExchangedError:  # the exchange is known from now on, before a pass begins
        together(passes, weights)
    return [each.output for each in passes]


class _Runner:
    """One pass, and the page that it waits for."""

    def __init__(self, one: Pass) -> None:
        self._pass = one
        self._greenlet = greenlet(one.run)
        self.wanted: Any = None  # the page that it waits for

    @property
    def done(self) -> bool:
        return bool(self._greenlet.dead)

    def go_on(self) -> None:
        """Runs the pass to the next page that is not in memory, or to its end."""
        with self._pass.active():
            self.wanted = self._greenlet.switch()

    def stop(self) -> None:
        if not self.done:
            with self._pass.active():
                self._greenlet.throw(GreenletExit)


class _Scheduler:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._holes = Holes()
        self._home = getcurrent()
        self._runners: list[_Runner] = []
        self._order: dict[Any, int] = {}  # page -> its number in the order in which the first pass asked for them

    def ask(self, page: Any) -> None:
        """Called in front of a module without its page. Leaves the pass; outside of a pass, reads the page at once."""
        if getcurrent() is self._home:
            self._weights.hold(page)
            return
        while self._weights.held is not page:
            self._home.switch(page)

    def run(self, first: Pass, others: Callable[[], Sequence[Pass] | None], left: Callable[[Any], None]) -> None:
        self._runners = [_Runner(first)]
        self._runners[0].go_on()
        following = None
        while True:
            if following is None:
                following = others()
                for each in following or ():
                    self._runners.append(_Runner(each))
                    self._runners[-1].go_on()
            standing = [runner for runner in self._runners if not runner.done]
            if not standing:
                return
            if standing[0] is self._runners[0]:
                self._order.setdefault(standing[0].wanted, len(self._order))
            page = min((r.wanted for r in standing), key=lambda p: self._order.get(p, len(self._order)))
            if self._weights.held is not page and self._weights.held is not None:
                left(self._weights.held)
            self._holes.close()
            self._weights.hold(page)
            for number, runner in enumerate(standing, 1):
                while runner.wanted is page and not runner.done:
                    runner.go_on()
                if number % BETWEEN == 0:
                    self._holes.close()

    def stop(self) -> None:
        """Ends the passes that are not finished."""
        for runner in self._runners:
            runner.stop()


# -- two sweeps, each of its own weights -----------------------------------------------------------------------


def in_step(first: Weights, run_first: Callable[[], None], second: Weights, run_second: Callable[[], None]) -> None:
    """Runs two sweeps of models of one structure in turns: the first goes through a block, then the second, and so on.

    Results of the first at a block therefore have to be kept for one block only.
    """
    sides = [_Side(first, run_first), _Side(second, run_second)]
    try:
        while standing := [side for side in sides if not side.done]:
            min(standing, key=lambda side: (side.laps, side.depth)).go_on()
    finally:
        for side in sides:
            side.stop()


class _Side(_Runner):
    """One of the two sweeps, and the depth of the block that it waits for."""

    def __init__(self, weights: Weights, run: Callable[[], None]) -> None:
        super().__init__(Call(run, contextlib.nullcontext))
        self._weights, self._home, self.depth = weights, getcurrent(), -1
        self.laps = 0  # how many times the sweep began again, with other prompts
        self._before, weights.turning = weights.turning, self._turn

    def _turn(self, page: Any) -> None:
        depth = self._weights.depth(page)
        self.laps += depth < self.depth
        self.depth = depth
        self._home.switch()

    def stop(self) -> None:
        self._weights.turning = self._before
        super().stop()
