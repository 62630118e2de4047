"""Two sweeps over weights that are read block by block, the second one block behind the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from duat_cli.models.sweep.lockstep import Weights


def in_step(first: Weights, run_first: Callable[[], None], second: Weights, run_second: Callable[[], None]) -> None:
    """Run two sweeps of models built alike: the first goes through a block, then the second, then the first goes on.

    What the first leaves behind of a block has to be kept for the time of one block.
    """
    sides = [_Side(first, run_first), _Side(second, run_second)]
    try:
        while standing := [side for side in sides if not side.done]:
            min(standing, key=lambda side: (side.laps, side.depth)).go_on()
    finally:
        for side in sides:
            side.stop()


class _Side:
    """One of the sweeps, and the block in front of which it stands."""

    def __init__(self, weights: Weights, run: Callable[[], None]) -> None:
        self._weights, self._home, self.depth = weights, getcurrent(), -1
        self.laps = 0  # how often the sweep went back to the beginning, with other prompts
        self._greenlet = greenlet(run)
        self._before, weights.turning = weights.turning, self._turn

    @property
    def done(self) -> bool:
        return bool(self._greenlet.dead)

    def go_on(self) -> None:
        self._greenlet.switch()

    def _turn(self, page: Any) -> None:
        depth = self._weights.depth(page)
        self.laps += depth < self.depth
        self.depth = depth
        self._home.switch()

    def stop(self) -> None:
        self._weights.turning = self._before
        if not self.done:
            self._greenlet.throw(GreenletExit)
