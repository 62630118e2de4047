"""The report of `duat check`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
    Certificate,
    DuatVersion,
    Environment,
    Finite,
    PromptFacts,
    Result,
    Run,
    SchemaVersion,
    Warnings,
    WithReasons,
)
from duat_cli.results.behaviour import Behaviour
from duat_cli.results.meaning import Meaning


class CheckedFile(Result):
    """A weight file, with its size."""

    name: str = Field(description="relative to the checkpoint's folder")
    bytes: int = Field(description="size")


class CheckedModel(WithReasons):
    """What was checked."""

    name: str = Field(description="the model, as it was named")
    path: str = Field(description="the folder that was read")
    revision: str | None = Field(description="commit of a hub checkpoint; null for a local folder")
    model_type: str | None = Field(description="transformers' name of the architecture, from config.json")
    files: list[CheckedFile] = Field(description="the weight files, with their sizes")
    tensors: int = Field(description="how many tensors the files hold")
    stored: list[str] = Field(description="dtypes of the stored tensors, by safetensors' names")
    header_sha256: str = Field(description="of names, shapes and dtypes of all tensors")
    fingerprint: str | None = Field(description="content hash of the loaded weights; not cryptographic")


_LIMIT = Meaning("in `unit`", "given", signed=True)


class Location(Result):
    """Where to look, or what to edit: a file, relative to the working directory where it lies below."""

    file: str = Field(description="its name")
    line: int = Field(ge=1, description="line in that file, from 1")


class Outcome(WithReasons):
    """One check at one place: what was measured, and what it was held against."""

    rule: str = Field(description="the rule's stable id")
    level: Literal["error", "warn"] = Field(description="what a finding of this rule counts as")
    status: Literal["passed", "failed", "warned", "skipped"] = Field(description="what became of the check")
    block: int | None = Field(description="number of the block, from 0; null where it belongs to none")
    where: str | None = Field(description="tensor, field of the inspect report, or file; null for the whole checkpoint")
    measured: Annotated[Finite | None, Meaning("in `unit`", "measured", signed=True)] = Field(
        description="what was measured, in `unit`"
    )
    low: Annotated[Finite | None, _LIMIT] = Field(description="the least that passes; null for no such bound")
    high: Annotated[Finite | None, _LIMIT] = Field(description="the most that passes; null for no such bound")
    beyond: Annotated[Finite | None, Meaning("in `unit`", "measured")] = Field(
        description="by how much `measured` lies outside; null where it passed"
    )
    unit: str = Field(description="unit of measured, low, high and beyond")
    message: str = Field(description="what was found, in words")
    advice: str | None = Field(description="what to do about it; null where nothing is to be done")
    source: str = Field(description="where level and threshold come from")
    location: Location


class Change(Result):
    """One entry of a baseline that --update-baseline wrote."""

    key: str = Field(description="the entry's name")
    old: str | None = Field(description="the value before")
    new: str | None = Field(description="the value now")


class BaselineFacts(Result):
    """The baseline, and what became of it."""

    file: str = Field(description="its name, as given")
    status: Literal["compared", "created", "updated", "unchanged", "not written"] = Field(
        description="what became of it"
    )
    entries: int = Field(description="how many metrics it holds")
    changes: list[Change] = Field(description="what --update-baseline changed")


class Counts(Result):
    """How many outcomes have each status."""

    passed: int = Field(description="how many checks passed")
    failed: int = Field(description="how many checks failed")
    warned: int = Field(description="how many checks warned")
    skipped: int = Field(description="how many checks did not run")


class CheckReport(Result):
    """`duat check`."""

    schema_version: SchemaVersion = "2"
    command: Annotated[Literal["check"], COMMAND] = "check"
    duat_version: DuatVersion
    verdict: Literal["passed", "failed"] = Field(description="whether the check passed")
    model: CheckedModel
    environment: Environment | None = Field(description="null without a forward pass")
    certificate: Certificate | None = Field(description="null without a forward pass")
    behaviour: Behaviour | None = Field(description="what the model answers; null without a forward pass")
    prompts: list[PromptFacts]
    policy: list[str] = Field(description="the policies that apply, the later over the earlier")
    baseline: Annotated[BaselineFacts | None, Meaning(needs="baseline")] = Field(description="null without --baseline")
    counts: Counts
    outcomes: list[Outcome] = Field(description="one a rule that passed or was skipped, one a finding")
    off: list[str] = Field(description="rules that the policy or --select turned off")
    warnings: Warnings
    run: Run
    reasons: dict[str, str] = Field(description="for every field above that is null: why it has no value")
