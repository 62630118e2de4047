"""The report of `duat check`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from duat_cli.results.base import Certificate, Environment, Finite, PromptFacts, Result, Run, WithReasons


class CheckedFile(Result):
    name: str = Field(description="relative to the checkpoint's folder")
    bytes: int


class CheckedModel(WithReasons):
    """What was checked."""

    name: str
    path: str = Field(description="the folder that was read")
    revision: str | None = Field(description="commit of a hub checkpoint; null for a local folder")
    model_type: str | None
    files: list[CheckedFile]
    tensors: int
    stored: list[str] = Field(description="dtypes of the stored tensors, by safetensors' names")
    header_sha256: str = Field(description="of names, shapes and dtypes of all tensors")
    fingerprint: str | None = Field(description="content hash of the loaded weights; not cryptographic")


class Location(Result):
    """Where to look, or what to edit: a file, relative to the working directory where it lies below."""

    file: str
    line: int = Field(ge=1)


class Outcome(WithReasons):
    """One check at one place: what was measured, and what it was held against."""

    rule: str = Field(description="the rule's stable id")
    level: Literal["error", "warn"] = Field(description="what a finding of this rule counts as")
    status: Literal["passed", "failed", "warned", "skipped"]
    block: int | None
    where: str | None = Field(description="tensor, field of the inspect report, or file; null for the whole checkpoint")
    measured: Finite | None = Field(description="what was measured, in `unit`")
    low: Finite | None = Field(description="the least that passes; null for no such bound")
    high: Finite | None = Field(description="the most that passes; null for no such bound")
    beyond: Finite | None = Field(description="by how much `measured` lies outside; null where it passed")
    unit: str
    message: str = Field(description="what was found, in words")
    advice: str | None = Field(description="what to do about it; null where nothing is to be done")
    source: str = Field(description="where level and threshold come from")
    location: Location


class Change(Result):
    """One entry of a baseline that --update-baseline wrote."""

    key: str
    old: str | None
    new: str | None


class BaselineFacts(Result):
    file: str
    status: Literal["compared", "created", "updated", "unchanged", "not written"]
    entries: int
    changes: list[Change] = Field(description="what --update-baseline changed")


class Counts(Result):
    passed: int
    failed: int
    warned: int
    skipped: int


class CheckReport(Result):
    """`duat check`."""

    schema_version: Literal["2"] = "2"
    command: Literal["check"] = "check"
    duat_version: str
    verdict: Literal["passed", "failed"]
    model: CheckedModel
    environment: Environment | None = Field(description="null without a forward pass")
    certificate: Certificate | None = Field(description="null without a forward pass")
    prompts: list[PromptFacts]
    policy: list[str] = Field(description="the policies that apply, the later over the earlier")
    baseline: BaselineFacts | None = Field(description="null without --baseline")
    counts: Counts
    outcomes: list[Outcome] = Field(description="one a rule that passed or was skipped, one a finding")
    off: list[str] = Field(description="rules that the policy or --select turned off")
    warnings: list[str]
    run: Run
    reasons: dict[str, str] = Field(description="for every field above that is null: why it has no value")
