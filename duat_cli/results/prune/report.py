"""The report of `duat prune-bound`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import COMMAND, Certificate, ModelReport, PromptFacts, Run, Skipped, Warnings
from duat_cli.results.prune.eq16 import Eq16
from duat_cli.results.prune.sets import Plan, PooledCosine
from duat_cli.results.prune.terms import Prediction, Protocol, PruneBlock, PruneTerm
from duat_cli.results.prune.written import Written


class PruneReport(ModelReport):
    """`duat prune-bound`."""

    command: Annotated[Literal["prune-bound"], COMMAND] = "prune-bound"
    prompts: list[PromptFacts]
    certificate: Certificate = Field(
        description="distance between the replay that `local` and `frozen` are read from and the model's own output; "
        "errors of `eq16` count as well"
    )
    protocol: Protocol
    blocks: list[PruneBlock]
    prediction: list[Prediction]
    plans: list[Plan]
    pooled: list[PooledCosine] = Field(
        default_factory=list,
        description="cosines between an embedder's pooled output and that without the set of each plan; empty unless "
        "the metric is hidden and the model predicts neither tokens nor classes",
    )
    eq16: list[Eq16] = Field(
        description="Eq. 16 for every whole block, attention and FFN and for the chosen set of every plan, beside what "
        "the removal does"
    )
    terms: list[PruneTerm]
    streamed: bool = Field(
        default=False,
        description="whether the weights were read block by block, from which --apply writes no checkpoint",
    )
    written: Written | None = Field(description="the checkpoint that --apply wrote; null without it")
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
