"""What differs between two runs of the same input: when, how long, how much memory."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duat_cli.results.base import Run


class Clock:
    """Started when it is made."""

    def __init__(self) -> None:
        self._started = datetime.now(UTC)
        self._tick = time.perf_counter()

    def run(self, planned_memory: int | None = None) -> Run:
        """The report's `run` object. planned_memory: bytes at most, where it was planned."""
        from duat_cli.loading.model.memory import peak_memory
        from duat_cli.results.base import Run

        started = self._started.isoformat(timespec="seconds")
        seconds = round(time.perf_counter() - self._tick, 3)
        return Run(
            started=started,
            seconds=seconds,
            peak_memory_bytes=peak_memory(),
            planned_memory_bytes=planned_memory,
        )
