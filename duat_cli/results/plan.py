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

    name: str = Field(description="name of a block or large layer, as the tensors are named in the files")
    stored_bytes: Bytes = Field(description="bytes of a block's or layer's tensors in the files")
    bytes: Bytes = Field(description="bytes of a block's or layer's tensors in memory, in the dtype of the run")


class PlannedWeights(Result):
    """Facts on the checkpoint's weights from the headers of the files."""

    stored_bytes: Bytes = Field(description="bytes of all tensors in the files")
    bytes: Bytes = Field(description="bytes of all tensors in memory, in the dtype of the run")
    blocks: int = Field(description="number of blocks that the tensors' names count; shared ones count once")
    largest_block: PlannedPart | None = Field(
        description="the block whose tensors take most bytes; null where no tensor's name has a number"
    )
    layers: list[PlannedPart] = Field(description="large layers outside of the blocks: embeddings and heads")
    frame_bytes: Bytes = Field(
        description="bytes in memory of all tensors outside of blocks and large layers, which stay there"
    )


class MemoryTerm(Result):
    """One addend of a peak."""

    what: str = Field(description="what takes this part of the peak memory")
    bytes: Estimate = Field(description="bytes of the peak memory that `what` takes")


class Way(Result):
    """One of the two ways to hold the weights."""

    weights: Residence = Field(
        description="how the weights are held. Resident: all in memory at once; streamed: one block at a time, the "
        "next one read meanwhile"
    )
    peak_memory_bytes: Annotated[
        int, Meaning("bytes", "estimate", how="within 10 % of the used one", formula="sum of the terms", checked=False)
    ] = Field(description="the most memory that the process will have")
    terms: list[MemoryTerm] = Field(description="what the peak memory consists of, term by term")
    weight_reads: Annotated[
        Finite, Meaning("1", "estimate", formula="bytes read / bytes of all tensors in the files", checked=False)
    ] = Field(description="how often the weights are read from the files")
    processes: int = Field(
        default=1, description="how many processes share the prompts, each with its own part of the memory"
    )
    waiting_bytes: Bytes = Field(
        default=0,
        description="memory of passes of prune-bound without a term that may wait for the next streamed block at the "
        "same time; more of them read the weights again",
    )
    fits: bool = Field(description="whether the peak memory is at most the limit")
    seconds: Annotated[
        Finite | None,
        Meaning(
            "s",
            "estimate",
            how="0.5 to 1.6 times what it took on an idle machine, nulls and Gram matrices not yet on the disk",
            formula="operations / rate of a matrix product + bytes read / rate of a read",
            checked=False,
        ),
    ] = Field(default=None, description="duration of the command; null without --time")


class PlanReport(Report):
    """`duat plan`."""

    command: Annotated[Literal["plan"], COMMAND] = "plan"
    planned_command: Planned = Field(description="the command that is planned")
    name: str = Field(description="the model, as it was named")
    dtype: str = Field(description="dtype of weights and arithmetic, e.g. float32")
    device: str = Field(default="cpu", description="device that computes; the peaks are of its memory")
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
    ] = Field(description="operations of all passes through the blocks; those for statistics of W' come on top")
    limit_bytes: Annotated[int, Meaning("bytes", "given", checked=False)] = Field(
        description="memory that the process may take: --memory, or what the system leaves"
    )
    ways: list[Way] = Field(
        description="the ways to hold the weights, each with its memory: resident and streamed; streamed alone where "
        "no model runs"
    )
    chosen: Residence | None = Field(
        description="the first way to hold the weights that fits, which the command takes; null where none fits, and "
        "it refuses"
    )
    reason: str | None = Field(description="what does not fit; null where a way fits")
    warnings: Warnings
    run: Run
