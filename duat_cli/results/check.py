"""The report of `duat check`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
    Certificate,
    Environment,
    Finite,
    PromptFacts,
    Report,
    Result,
    Run,
    Warnings,
    WithReasons,
)
from duat_cli.results.behaviour import Behaviour
from duat_cli.results.meaning import Meaning
from duat_cli.results.prompts import AS_SET, WHICH, PromptSetFacts


class CheckedFile(Result):
    """A weight file, with its size."""

    name: str = Field(description="relative to the checkpoint's folder")
    bytes: int = Field(description="size")


class CheckedModel(WithReasons):
    """The checkpoint that was checked."""

    name: str = Field(description="the model, as it was named")
    path: str = Field(description="the folder that was read")
    revision: str | None = Field(description="commit of a hub checkpoint; null for a local folder")
    model_type: str | None = Field(description="transformers' name of the architecture, from config.json")
    files: list[CheckedFile] = Field(description="the weight files, with their sizes")
    tensors: int = Field(description="how many tensors the files hold")
    stored: list[str] = Field(description="dtypes of the stored tensors, by safetensors' names")
    quantised: str | None = Field(
        default=None, description="how the files hold quantised weights; null where they hold the weights as they are"
    )
    stack: str | None = Field(
        default=None,
        description="which stack of a model of several ran: vision, audio, text, encoder, decoder; null where there is "
        "one, and without a forward pass",
    )
    header_sha256: str = Field(description="of names, shapes and dtypes of all tensors")
    fingerprint: str | None = Field(description="content hash of the loaded weights; not cryptographic")


_LIMIT = Meaning("in `unit`", "given", signed=True)


class Location(Result):
    """A place to look at or edit: a file, by its path relative to the working directory if it is within that."""

    file: str = Field(description="its name")
    line: int = Field(ge=1, description="line in that file, from 1")


class Outcome(WithReasons):
    """One check at one place: the measured value, and the limit that it was held against."""

    rule: str = Field(description="the rule's stable id")
    level: Literal["error", "warn"] = Field(description="what a finding of this rule counts as")
    status: Literal["passed", "failed", "warned", "skipped"] = Field(description="what became of the check")
    block: int | None = Field(description="number of the block, from 0; null where it belongs to none")
    where: str | None = Field(
        description="tensor, field of the inspect report or of config.json, or file; null for the whole checkpoint"
    )
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
    behind: str | None = Field(
        default=None,
        description="id of the cause that this finding follows from; null for a cause's own, and for no finding",
    )


class Cause(Result):
    """A cause of findings: what failed or warned first, and how much follows from it."""

    id: str = Field(description="what `behind` of an outcome names: a rule's id, 'weights' or 'forward'")
    origin: Literal["files", "config", "tokenizer", "weights", "adapter", "forward", "policy"] = Field(
        description="where it lies: files and their values, config.json, the tokenizer, weights that moved, the "
        "adapter, numbers of the forward pass that nothing before them explains, or a limit that the policy sets"
    )
    status: Literal["failed", "warned"] = Field(description="the worst of its own findings")
    rules: list[str] = Field(description="rules of its own findings")
    block: int | None = Field(description="the first block it concerns, from 0; null where it belongs to none")
    where: str | None = Field(description="the first place: tensor, field or file; null for the whole checkpoint")
    message: str = Field(description="what was found, in words")
    findings: list[int] = Field(description="its own findings: positions in `outcomes`, the first in depth first")
    effects: list[int] = Field(description="findings that follow from it: positions in `outcomes`, farthest first")
    folded: str | None = Field(description="its effects in one sentence; null where it has none")


class RuleFacts(Result):
    """A rule that ran."""

    id: str = Field(description="its stable id")
    about: str = Field(description="what it looks at")
    advice: str = Field(description="what to do about a finding")


class Change(Result):
    """One entry of a baseline that --update-baseline wrote."""

    key: str = Field(description="the entry's name")
    old: str | None = Field(description="the value before")
    new: str | None = Field(description="the value now")


class BaselineFacts(Result):
    """The baseline, and whether it was compared or written."""

    file: str = Field(description="its name, as given; of --base the checkpoint's")
    base: bool = Field(default=False, description="whether it was made in this run, of the checkpoint of --base")
    status: Literal["compared", "created", "updated", "unchanged", "not written"] = Field(
        description="what became of it"
    )
    entries: int = Field(description="how many metrics it holds")
    compared: int | None = Field(
        default=None, description="how many of them this run has as well; null where the baseline is written"
    )
    changes: list[Change] = Field(
        description="what --update-baseline changed: what the checkpoint says of itself, then weights, then numbers of "
        "the forward pass"
    )


class Counts(Result):
    """How many outcomes have each status."""

    passed: int = Field(description="how many checks passed")
    failed: int = Field(description="how many checks failed")
    warned: int = Field(description="how many checks warned")
    skipped: int = Field(description="how many checks did not run, or not everywhere")


class CheckReport(Report):
    """`duat check`."""

    command: Annotated[Literal["check"], COMMAND] = "check"
    verdict: Literal["passed", "failed"] = Field(description="whether the check passed")
    model: CheckedModel
    environment: Environment | None = Field(description="null without a forward pass")
    certificate: Certificate | None = Field(description="null without a forward pass")
    behaviour: Behaviour | None = Field(description="what the model answers; null without a forward pass")
    prompts: Annotated[list[PromptFacts], WHICH]
    prompt_set: Annotated[PromptSetFacts | None, AS_SET] = None
    policy: list[str] = Field(description="the policies that apply, the later over the earlier")
    baseline: Annotated[BaselineFacts | None, Meaning(needs="baseline")] = Field(description="null without --baseline")
    counts: Counts
    causes: list[Cause] = Field(
        description="the findings by what failed first: files, config.json, tokenizer, weights in the order of depth, "
        "then what stands for itself"
    )
    outcomes: list[Outcome] = Field(
        description="one a rule that passed or was skipped, one a finding, and one for what of a rule that ran could "
        "not be looked at"
    )
    rules: list[RuleFacts] = Field(description="the rules that ran")
    off: list[str] = Field(description="rules that the policy or --select turned off")
    warnings: Warnings
    run: Run
    reasons: dict[str, str] = Field(description="for every field above that is null: why it has no value")


class Problem(Result):
    """The error because of which there is no verdict."""

    kind: Literal["input", "checkpoint", "unsupported", "memory", "stopped", "internal"] = Field(
        description="an option or a file beside the checkpoint; the checkpoint's files; a model without a proven form; "
        "memory; a signal; a fault of duat itself"
    )
    message: str = Field(description="the line on standard error")
    exit_code: int = Field(description="2, or 130 and 143 on signals")


class UndecidedReport(Report):
    """`duat check` without a verdict."""

    command: Annotated[Literal["check"], COMMAND] = "check"
    verdict: Literal["undecided"] = Field(description="neither passed nor failed")
    model: str | None = Field(description="the model, as it was named; null for the bundled demo")
    error: Problem
