"""What differs between two runs of the same input: when, how long, how much memory."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from duat_cli.results.base import Run


class RunFacts(Protocol):
    """What a report says of a run, as `Clock.run`."""

    def __call__(self, planned_memory: int | None = None, /, *, device: str = "cpu", shared: int = 0) -> Run: ...


NO_GPU = "no CUDA device computed"
NOT_PLANNED = "nothing was planned: no weights were read, or the model was in memory already"


class Clock:
    """Started when it is made."""

    def __init__(self) -> None:
        self._started = datetime.now(UTC)
        self._tick = time.perf_counter()

    def run(
        self, planned_memory: int | None = None, not_planned: str = NOT_PLANNED, *, device: str = "cpu", shared: int = 0
    ) -> Run:
        """The report's `run` object. planned_memory: bytes at most, where it was planned; else why it was not. device:
        what computed. shared: bytes that several processes had together at most, this one among them."""
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
