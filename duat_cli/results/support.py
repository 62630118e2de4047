"""The report of `duat support`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import COMMAND, Finite, Report, Result, Run
from duat_cli.results.meaning import Meaning

Status = Literal["exact", "partly", "refused"]
Modality = Literal["text", "vision", "audio", "vision-language", "audio-language", "several", "other"]


class StackEntry(Result):
    """How far duat understands one stack of a model of several."""

    stack: str = Field(description="the value of --stack")
    status: Status = Field(description="how much of it is covered")
    reason: str | None = Field(description="what is not covered, or why it was refused; null where it is exact")


class SupportEntry(Result):
    """How far duat understands one model."""

    model_type: str = Field(description="transformers' name of the architecture")
    modality: Modality = Field(
        default="text", description="what its forward pass reads; 'several': more than two kinds"
    )
    stacks: list[StackEntry] = Field(
        default=[], description="of a model of several: what --stack can name, and how far"
    )
    status: Status = Field(description="how much of it is covered")
    path: Literal["attention interface", "softmax interception", "frozen kernel"] | None = Field(
        description="how attention was seen, as `capture` of a certificate; null where it was refused before that"
    )
    parts: list[str] = Field(description="for 'partly': what is not covered")
    reason: str | None = Field(description="why it was refused")
    relative_error: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "measured",
            formula="max over blocks of |x_i - rebuilt_i| / |x_i| on one random input",
            source="Eq. 11/12, 33/34",
        ),
    ] = Field(description="relative error of the rebuilt output against the model's own")


class SupportReport(Report):
    """`duat support`."""

    command: Annotated[Literal["support"], COMMAND] = "support"
    transformers: str = Field(description="version of transformers")
    entries: list[SupportEntry]
    run: Run
