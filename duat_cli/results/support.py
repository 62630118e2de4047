"""The report of `duat support`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import COMMAND, REBUILT, Finite, Report, Result, Run

Status = Annotated[
    Literal["exact", "partly", "refused"],
    Field(
        description="how much of the model or stack is covered: all (exact), all but some parts (partly), or nothing "
        "(refused)"
    ),
]
Modality = Literal["text", "vision", "audio", "vision-language", "audio-language", "several", "other"]


class StackEntry(Result):
    """How far duat understands one stack of a model of several."""

    stack: str = Field(description="name of the stack, the value of --stack")
    status: Status
    reason: str | None = Field(
        description="what of the stack is not covered, or why it was refused; null where it is exact"
    )


class SupportEntry(Result):
    """How far duat understands one model."""

    model_type: str = Field(description="transformers' name of the architecture")
    modality: Modality = Field(
        default="text", description="kind of input that the model's forward pass reads; 'several': more than two kinds"
    )
    stacks: list[StackEntry] = Field(
        default=[],
        description="stacks that --stack can name, with how far each is covered; empty for a model of one stack",
    )
    status: Status
    path: Literal["attention interface", "softmax interception", "frozen kernel"] | None = Field(
        description="how attention was seen, as `capture` of a certificate; null where the model was refused before "
        "that"
    )
    parts: list[str] = Field(description="what of the model is not covered, where `status` is 'partly'; else empty")
    reason: str | None = Field(description="why the model was refused; null where it was not")
    relative_error: Annotated[Finite | None, REBUILT] = Field(
        description="relative error of the rebuilt outputs of blocks against the model's own, largest over blocks, on "
        "one random input; null where the model as a whole was refused"
    )


class SupportReport(Report):
    """`duat support`."""

    command: Annotated[Literal["support"], COMMAND] = "support"
    transformers: str = Field(description="version of transformers")
    entries: list[SupportEntry]
    run: Run
