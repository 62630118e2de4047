"""Plans a command: the memory and time it will need, and whether its weights are resident or streamed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duat_cli.analysis.plan.memory import SPARE, kernel_factors, peak, shared
from duat_cli.analysis.plan.pace import DISCOVERY, LONG, SHARE, SLOW, START, Pace, measured_pace, work
from duat_cli.analysis.plan.pruning import ablation_bytes
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import size_of, term
from duat_cli.analysis.plan.work import operations, weight_reads
from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.parts import Part
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.model.memory import memory_limit
from duat_cli.results.plan import MemoryTerm, PlannedPart, PlannedWeights, Residence, Way
from duat_cli.text import clean

if TYPE_CHECKING:
    import torch

_MIB, _GIB = 1 << 20, 1 << 30
SMALL_BLOCK = 32 << 20  # bytes up to which a block runs as well with one thread as with many
_NAMED = 3  # how many terms of a peak a message names


@dataclass(frozen=True)
class Plan:
    """The ways to run a command, and the limit of the process."""

    files: CheckpointFiles
    shape: Shape
    limit: int
    """Bytes."""
    ways: tuple[Way, ...]
    operations: float
    task: Task

    @property
    def chosen(self) -> Way | None:
        """The first way that fits."""
        return next((way for way in self.ways if way.fits), None)

    @property
    def reason(self) -> str | None:
        """Text on what is too large, for a plan in which no way fits; None for others."""
        if self.chosen is not None:
            return None
        least = min(self.ways, key=lambda way: way.peak_memory_bytes)
        terms = sorted(least.terms, key=lambda term: -term.bytes)[:_NAMED]
        said = ", ".join(f"{clean(term.what)} {_size(term.bytes)}" for term in terms)
        block = _largest_block(self.shape)
        if block is not None:
            size = _size(block.elements * self.shape.element)
            said += f"; the largest block, {clean(block.name)}, takes {size} as {self.shape.dtype}"
        needed, left = _size(least.peak_memory_bytes, math.ceil), _size(self.limit, math.floor)
        return f"{least.weights}, it needs {needed} of memory ({said}), has {left}"

    def may_be_long(self, way: Way) -> bool:
        """Whether a way may take longer than LONG seconds, on a slow machine."""
        return self.seconds(way, SLOW) > LONG

    def pace(self, device: str = "cpu") -> Pace:
        """Measured rates of this machine."""
        alone = any(way.processes > 1 for way in self.ways)
        return measured_pace(self.files, self.shape, self.task, device, alone=alone)

    def seconds(self, way: Way, pace: Pace) -> float:
        """How long a way takes, in seconds. Reading and computing overlap where weights are streamed; where they are
        resident, one follows the other."""
        computing = work(self.shape, self.task, way.weights) / (SHARE * pace.of(way.processes))
        reading = way.weight_reads * self.files.total_bytes / pace.bytes
        start = START + DISCOVERY * len(self.shape.parts.blocks)
        return start + (max(computing, reading) if way.weights == "streamed" else computing + reading)

    def timed(self, device: str) -> Plan:
        """The plan with the seconds that each way takes on a device."""
        pace = self.pace(device)
        ways = (way.model_copy(update={"seconds": self.seconds(way, pace)}) for way in self.ways)
        return replace(self, ways=tuple(ways))

    def weights(self) -> PlannedWeights:
        """Facts on the weights, from the headers."""
        parts, block = self.shape.parts, _largest_block(self.shape)
        return PlannedWeights(
            stored_bytes=self.files.total_bytes,
            bytes=self.shape.weights,
            blocks=len(parts.blocks),
            largest_block=None if block is None else self._part(block),
            layers=[self._part(layer) for layer in parts.layers],
            frame_bytes=parts.frame.elements * self.shape.element,
        )

    def _part(self, part: Part) -> PlannedPart:
        return PlannedPart(name=part.name, stored_bytes=part.stored, bytes=part.elements * self.shape.element)


def plan(files: CheckpointFiles, task: Task, dtype: str, memory: int | None, *, roomy: bool = True) -> Plan:
    """Of a command. dtype: of `--dtype`; memory: bytes of `--memory`, None: what the system leaves. roomy: whether what
    is left may be taken so that weights are read less often.

    A re-initialised model is planned beside the first where both fit. Where no model runs, there is only one way:
    tensors are looked at one after the other.
    """
    shape, limit = shape_of(files, dtype), memory_limit() if memory is None else memory
    tuned = None if task.tuned is None else shape_of(task.tuned, dtype)
    ways = []
    residences: tuple[Residence, ...] = ("resident", "streamed") if task.runs else ("streamed",)
    for weights in residences:
        asked = task if weights == "resident" or not roomy else _with_room(shape, task, limit)
        terms = peak(shape, asked, weights, tuned)
        total = sum(term.bytes for term in terms)
        beside, second = list[MemoryTerm](), task.reinitialised and weights == "resident"
        if second and total + SPARE * shape.weights <= limit:
            size = shape.weights + kernel_factors(shape)
            beside = [term("the re-initialised model, unless its statistics are cached", size)]
        processes = _processes(shape, task, limit, beside, tuned) if weights == "resident" else 1
        if processes > 1:
            terms = max(terms, shared(shape, task, processes, tuned), key=size_of)
        terms += beside
        total = size_of(terms)
        ways.append(
            Way(
                weights=weights,
                peak_memory_bytes=total,
                terms=[term for term in terms if term.bytes],
                weight_reads=weight_reads(shape, asked, weights),
                processes=processes,
                waiting_bytes=asked.waiting if weights == "streamed" and task.pruning is not None else 0,
                fits=total <= limit,
            )
        )
    return Plan(files, shape, limit, tuple(ways), operations(shape, task), task)


def _processes(shape: Shape, task: Task, limit: int, beside: list[MemoryTerm], tuned: Shape | None) -> int:
    """How many processes share the prompts: all that may, or as many as have a prompt and room.

    With large blocks it is 1 unless all processes can take part, as threads are then faster. beside: further terms in
    memory.
    """
    apart = task.command != "prune-bound"  # the first prompt runs before the others
    most = min(task.processes, len(task.tokens) - apart)
    while most > 1 and size_of([*shared(shape, task, most, tuned), *beside]) > limit:
        most -= 1
    block = _largest_block(shape)
    small = block is not None and block.elements * shape.element <= SMALL_BLOCK
    return max(1, most) if small or most == task.processes else 1


def _with_room(shape: Shape, task: Task, limit: int) -> Task:
    """The task for weights read block by block, with more passes side by side if they fit into half of the free memory;
    passes that do not fit read the weights again."""
    if task.pruning is None:
        return task
    needed = max(ablation_bytes(shape, task))
    left = limit - size_of(peak(shape, task, "streamed"))
    return replace(task, waiting=max(task.waiting, min(needed, task.waiting + left // 2)))


def on_device(device: torch.device, task: Task, memory: int | None) -> tuple[Task, int | None]:
    """The task and its memory (as in `ModelRequest`), adapted to the device."""
    from duat_cli.loading.model.gpu import sees_accelerator

    if device.type == "cuda":
        from duat_cli.analysis.plan.room import left_on

        return replace(task, processes=1, gpu=True), left_on(device, memory)
    if task.command != "prune-bound" and sees_accelerator():  # their first prompt may run gradients before a fork
        return replace(task, processes=1), memory
    return task, memory


def way_of(made: Plan) -> Way:
    """The way that fits. Raises CheckpointError, one line, where there is none."""
    if made.chosen is None:
        raise CheckpointError(f"{clean(str(made.files.path))}: {made.reason}")
    return made.chosen


def _largest_block(shape: Shape) -> Part | None:
    return max(shape.parts.blocks, key=lambda block: block.elements, default=None)


def _size(size: int, rounded: Callable[[float], int] = round) -> str:
    return f"{rounded(size / _MIB)} MiB" if size < _GIB else f"{rounded(100 * size / _GIB) / 100:.2f} GiB"
