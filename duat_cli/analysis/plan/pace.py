"""How long a run takes: its operations and bytes at the rates of this machine, measured by one matrix product and one
read. The estimate was 0.5 to 1.6 times what commands took on an idle machine; it is less where others compute, too."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.work import comparing_operations, operations, statistics_operations, untrained_operations
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.results.plan import Residence

START = 3.0  # seconds for importing libraries
DISCOVERY = 0.1  # seconds per block
SHARE = 0.6  # of the rate of one large product that a model's blocks reach
ROWS = 128  # rows of the measured product, for prompts of that length or longer, or passes side by side
PATIENCE = 0.1  # seconds of measured products
READ = 32 << 20  # bytes of the measured read
LONG = 60.0  # seconds from which on a command says how long it will take
SLOWEST = 1e9  # operations per second; the rate is only measured for work that takes longer than LONG at this one


@dataclass(frozen=True)
class Pace:
    """Rates of this machine, with the threads that torch has here."""

    operations: float
    """Floating-point operations per second in a product of matrices."""
    bytes: float
    """Bytes per second read from the files."""
    alone: float | None = None
    """Operations per second with one thread; None: the same."""

    def of(self, processes: int) -> float:
        """Operations per second of so many processes together."""
        alone = self.operations if self.alone is None else self.alone
        return self.operations if processes == 1 else processes * alone


SLOW = Pace(SLOWEST, SLOWEST / 10)
"""Rates of a slow machine."""


def work(shape: Shape, task: Task, weights: Residence) -> float:
    """Floating-point operations of a run, with statistics and nulls, as if none of these were cached on disk."""
    behind = statistics_operations(shape, task) + untrained_operations(shape, task, weights)
    return operations(shape, task) + behind + comparing_operations(shape, task)


def rows_of(task: Task) -> int:
    """Rows of a run's matrix products: tokens of a prompt on average, up to ROWS, as products with few rows are slower
    per row. Ablations go side by side, with ROWS."""
    if task.pruning is not None or not task.tokens:
        return ROWS
    return max(1, min(ROWS, sum(task.tokens) // len(task.tokens)))


def measured_pace(files: CheckpointFiles, shape: Shape, task: Task, device: str, *, alone: bool) -> Pace:
    """Rates measured by a product with the block's shape and the task's rows, and by a read from the middle of the
    largest file, which is faster if the system has it cached. alone: whether to measure the rate of one thread, too."""
    import torch

    # Pruning spends its time on gradients, readings and bounds, which are wider than passes in half precision.
    rows, dtype = rows_of(task), torch.float32 if task.pruning is not None else getattr(torch, shape.dtype)
    left = torch.ones(rows, shape.width, dtype=dtype, device=device)
    right = torch.ones(shape.width, shape.inner, dtype=dtype, device=device)

    def rate() -> float:
        float((left @ right)[0, 0])  # the first product also loads libraries
        done, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < PATIENCE or not done:
            float((left @ right)[0, 0])
            done += 1
        return 2.0 * rows * shape.width * shape.inner * done / spent

    found, threads = Pace(rate(), _reading(files)), torch.get_num_threads()
    if not alone or threads == 1:
        return found
    torch.set_num_threads(1)
    try:
        return replace(found, alone=rate())
    finally:
        torch.set_num_threads(threads)


def _reading(files: CheckpointFiles) -> float:
    path = max((files.path / shard for shard in files.shards), key=lambda file: file.stat().st_size)
    with path.open("rb", buffering=0) as file:
        size = min(READ, path.stat().st_size)
        file.seek((path.stat().st_size - size) // 2)
        start = time.perf_counter()
        return len(file.read(size)) / max(time.perf_counter() - start, 1e-9)
