"""Facts of a run that differ between two runs on the same input: start, duration, memory."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from duat_cli.results.base import Run


class RunFacts(Protocol):
    """Makes a report's `run` object, as `Clock.run` does."""

    def __call__(self, planned_memory: int | None = None, /, *, device: str = "cpu", shared: int = 0) -> Run: ...


NO_GPU = "no CUDA device computed"
NOT_PLANNED = "nothing was planned: no weights were read, or the model was in memory already"


class Clock:
    """A clock that starts when it is made."""

    def __init__(self) -> None:
        self._started = datetime.now(UTC)
        self._tick = time.perf_counter()

    def run(
        self, planned_memory: int | None = None, not_planned: str = NOT_PLANNED, *, device: str = "cpu", shared: int = 0
    ) -> Run:
        """The report's `run` object.

        planned_memory: planned peak, bytes; None: not planned, for the reason `not_planned`. device: the one that
        computed. shared: peak bytes of several processes together, including this one.
        """
        from duat_cli.loading.model.gpu import peak_gpu_memory
        from duat_cli.loading.model.memory import peak_memory
        from duat_cli.results.base import Run

        started = self._started.isoformat(timespec="seconds")
        seconds = round(time.perf_counter() - self._tick, 3)
        return Run.explained(
            not_planned,
            {"gpu_memory_bytes": NO_GPU},
            started=started,
            seconds=seconds,
            peak_memory_bytes=max(peak_memory(), shared),
            gpu_memory_bytes=peak_gpu_memory(device),
            planned_memory_bytes=planned_memory,
        )
