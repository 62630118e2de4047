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
    certificate: Certificate = Field(description="of the replay that local and frozen are read from")
    protocol: Protocol
    blocks: list[PruneBlock]
    prediction: list[Prediction]
    plans: list[Plan]
    pooled: list[PooledCosine] = Field(
        default_factory=list,
        description="of the plans' sets, where the metric is hidden and the model predicts neither tokens nor classes",
    )
    eq16: list[Eq16] = Field(description="of every whole part and of the chosen set of every plan")
    terms: list[PruneTerm]
    streamed: bool = Field(
        default=False, description="the weights were read block by block, from which --apply writes no checkpoint"
    )
    written: Written | None = Field(description="the checkpoint that --apply wrote; null without it")
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
