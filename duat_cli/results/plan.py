"""The report of `duat plan`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.kinds import Planned
from duat_cli.results.base import COMMAND, Finite, Report, Result, Run, Warnings
from duat_cli.results.meaning import Meaning

Residence = Literal["resident", "streamed"]
Bytes = Annotated[int, Meaning("bytes", "exact", checked=False)]
Estimate = Annotated[int, Meaning("bytes", "estimate", checked=False)]


class PlannedPart(Result):
    """Weights that are in memory together."""

    name: str = Field(description="the module, as the tensors are named in the files")
    stored_bytes: Bytes = Field(description="of its tensors in the files")
    bytes: Bytes = Field(description="of its tensors in memory, in the dtype of the run")


class PlannedWeights(Result):
    """Facts on the weights from the headers of the files."""

    stored_bytes: Bytes = Field(description="of all tensors in the files")
    bytes: Bytes = Field(description="of all tensors in memory, in the dtype of the run")
    blocks: int = Field(description="how many blocks the tensors' names number; shared ones count once")
    largest_block: PlannedPart | None = Field(description="the block of most bytes; null where no name is numbered")
    layers: list[PlannedPart] = Field(description="large layers outside of the blocks: embeddings and heads")
    frame_bytes: Bytes = Field(description="of all other tensors in memory, which stay there")


class MemoryTerm(Result):
    """One addend of a peak."""

    what: str = Field(description="what takes it")
    bytes: Estimate = Field(description="how much it takes")


class Way(Result):
    """One of the two ways to hold the weights."""

    weights: Residence = Field(
        description="resident: all in memory at once; streamed: one block at a time, the next one read meanwhile"
    )
    peak_memory_bytes: Annotated[
        int, Meaning("bytes", "estimate", how="within 10 % of the used one", formula="sum of the terms", checked=False)
    ] = Field(description="the most memory that the process will have")
    terms: list[MemoryTerm] = Field(description="what is in memory at the peak")
    weight_reads: Annotated[
        Finite, Meaning("1", "estimate", formula="bytes read / bytes of all tensors in the files", checked=False)
    ] = Field(description="how often the weights are read from the files")
    processes: int = Field(
        default=1, description="how many processes share the prompts, each with its own part of the memory"
    )
    waiting_bytes: Bytes = Field(
        default=0,
        description="of prune-bound, streamed: passes without a term that may wait for the next block at the same "
        "time; more of them read the weights again",
    )
    fits: bool = Field(description="whether the peak is at most the limit")
    seconds: Annotated[
        Finite | None,
        Meaning(
            "s",
            "estimate",
            how="0.5 to 1.6 times what it took on an idle machine, nulls and Gram matrices not yet on the disk",
            formula="operations / rate of a matrix product + bytes read / rate of a read",
            checked=False,
        ),
    ] = Field(default=None, description="how long it takes, with --time; else null")


class PlanReport(Report):
    """`duat plan`."""

    command: Annotated[Literal["plan"], COMMAND] = "plan"
    planned_command: Planned = Field(description="the command that is planned")
    name: str = Field(description="the model, as it was named")
    dtype: str = Field(description="dtype of weights and arithmetic, e.g. float32")
    device: str = Field(default="cpu", description="what computes; the peaks are of its memory")
    prompt_tokens: list[int] = Field(description="number of tokens of every prompt")
    weights: PlannedWeights
    operations: Annotated[
        Finite,
        Meaning(
            "floating-point operations",
            "estimate",
            formula="sum over passes of 2 P T + 4 L N^2 H d, P elements of the blocks' matrices, T tokens",
            checked=False,
        ),
    ] = Field(description="of the passes through the blocks; statistics of W' come on top")
    limit_bytes: Annotated[int, Meaning("bytes", "given", checked=False)] = Field(
        description="what the process may take: --memory, or what the system leaves"
    )
    ways: list[Way] = Field(description="resident and streamed")
    chosen: Residence | None = Field(description="the first way that fits, which the command takes; null: it refuses")
    reason: str | None = Field(description="for null: what does not fit")
    warnings: Warnings
    run: Run
