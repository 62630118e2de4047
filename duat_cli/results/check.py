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

    name: str = Field(description="path of a weight file, relative to the checkpoint's folder")
    bytes: int = Field(description="size of a weight file")


class CheckedModel(WithReasons):
    """The checkpoint that was checked."""

    name: str = Field(description="the model, as it was named")
    path: str = Field(description="folder of the checkpoint that was read")
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
        description="stack that ran, of a model of several: vision, audio, text, encoder or decoder; null where there "
        "is one, and without a forward pass",
    )
    header_sha256: str = Field(description="SHA-256 of names, shapes and dtypes of all tensors")
    fingerprint: str | None = Field(
        description="content hash of the loaded weights, not cryptographic; null where no model was run"
    )


_LIMIT = Meaning("in `unit`", "given", signed=True)


class Location(Result):
    """A place to look at or edit: a file, by its path relative to the working directory if it is within that."""

    file: str = Field(
        description="file to look at or edit, by its path relative to the working directory if it is within that"
    )
    line: int = Field(ge=1, description="line to look at or edit in the file, from 1")


class Outcome(WithReasons):
    """One check at one place: the measured value, and the limit that it was held against."""

    rule: str = Field(description="stable id of the rule that was checked")
    level: Literal["error", "warn"] = Field(
        description="what a finding of the check counts as: an error fails the checkpoint, a warning does not"
    )
    status: Literal["passed", "failed", "warned", "skipped"] = Field(
        description="result of the check: passed; failed, a finding of level error; warned, one of level warn; skipped"
    )
    block: int | None = Field(
        description="number of the block that a finding is about, from 0; null where it is about none"
    )
    where: str | None = Field(
        description="what the check looked at: a tensor, a field of the inspect report or of config.json, or a file; "
        "null for the whole checkpoint"
    )
    measured: Annotated[Finite | None, Meaning("in `unit`", "measured", signed=True)] = Field(
        description="value that the check measured, in `unit`; null where there is none"
    )
    low: Annotated[Finite | None, _LIMIT] = Field(
        description="least value of `measured` that passes; null where nothing is too small"
    )
    high: Annotated[Finite | None, _LIMIT] = Field(
        description="largest value of `measured` that passes; null where nothing is too large"
    )
    beyond: Annotated[Finite | None, Meaning("in `unit`", "measured")] = Field(
        description="distance of `measured` from the nearest value that passes; null where the check passed, was "
        "skipped, or measured no finite value"
    )
    unit: str = Field(description="unit of `measured`, `low`, `high` and `beyond`")
    message: str = Field(description="what was found, in words")
    advice: str | None = Field(description="what to do about the finding; null where nothing is to be done")
    source: str = Field(
        description="where the level and the limit of the check come from, such as a policy or the baseline"
    )
    location: Location
    behind: str | None = Field(
        default=None,
        description="id of the cause that a finding follows from; null for a cause's own findings, and where nothing "
        "was found",
    )


class Cause(Result):
    """A cause of findings: what failed or warned first, and how much follows from it."""

    id: str = Field(
        description="id of a cause, by which `behind` of an outcome names it: a rule's id, 'weights' or 'forward'"
    )
    origin: Literal["files", "config", "tokenizer", "weights", "adapter", "forward", "policy"] = Field(
        description="where a cause of findings lies: files and their values, config.json, the tokenizer, weights that "
        "moved, the adapter, numbers of the forward pass that nothing before them explains, or a limit that the policy "
        "sets"
    )
    status: Literal["failed", "warned"] = Field(description="the worst status of a cause's own findings")
    rules: list[str] = Field(description="rules of a cause's own findings")
    block: int | None = Field(
        description="number of the first block that a cause concerns, from 0; null where its first finding is about "
        "none"
    )
    where: str | None = Field(
        description="the first place that a cause concerns: tensor, field or file; null for the whole checkpoint"
    )
    message: str = Field(description="what was found, in words")
    findings: list[int] = Field(
        description="a cause's own findings: positions in `outcomes`, failed before warned; of weights by depth"
    )
    effects: list[int] = Field(
        description="findings that follow from a cause: positions in `outcomes`, those that moved farthest first"
    )
    folded: str | None = Field(description="the effects of a cause in one sentence; null where it has none")


class RuleFacts(Result):
    """A rule that ran."""

    id: str = Field(description="stable id of a rule that ran")
    about: str = Field(description="what a rule looks at")
    advice: str = Field(description="what to do about a finding of a rule")


class Change(Result):
    """One entry of a baseline that --update-baseline wrote."""

    key: str = Field(description="name of the changed entry of the baseline")
    old: str | None = Field(description="value of a baseline's entry before --update-baseline; null for a new entry")
    new: str | None = Field(
        description="value of a baseline's entry after --update-baseline; null for one that is gone"
    )


class BaselineFacts(Result):
    """The baseline, and whether it was compared or written."""

    file: str = Field(description="name of the baseline's file, as given; with --base, the base's name")
    base: bool = Field(
        default=False, description="whether the baseline was made in this run, of the checkpoint of --base"
    )
    status: Literal["compared", "created", "updated", "unchanged", "not written"] = Field(
        description="what became of the baseline"
    )
    entries: int = Field(description="number of metrics that the baseline holds")
    compared: int | None = Field(
        default=None,
        description="number of the baseline's metrics that this run has as well; null where the baseline is written",
    )
    changes: list[Change] = Field(
        description="entries of the baseline that --update-baseline changed: what the checkpoint says of itself, then "
        "weights, then numbers of the forward pass"
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
    verdict: Literal["passed", "failed"] = Field(
        description="whether the checkpoint passed: no check of level error has a finding"
    )
    model: CheckedModel
    environment: Environment | None = Field(
        description="software, hardware and dtype that the numbers were computed with; null without a forward pass"
    )
    certificate: Certificate | None = Field(
        description="how far the DUAT form is from the model's own output; null without a forward pass"
    )
    behaviour: Behaviour | None = Field(
        description="predictions of the model on the prompts; null without a forward pass, and where no rule that is "
        "on needs them"
    )
    prompts: Annotated[list[PromptFacts], WHICH]
    prompt_set: Annotated[PromptSetFacts | None, AS_SET] = None
    policy: list[str] = Field(description="the policies of the check, a later one over an earlier one")
    baseline: Annotated[BaselineFacts | None, Meaning(needs="baseline")] = Field(
        description="the baseline, and whether it was compared or written; null without --baseline and --base"
    )
    counts: Counts
    causes: list[Cause] = Field(
        description="the findings by what failed first: files, config.json, tokenizer, weights in the order of depth, "
        "then what stands for itself"
    )
    outcomes: list[Outcome] = Field(
        description="results of the checks: one a rule that passed or was skipped, one a finding, and one for what of "
        "a rule that ran could not be looked at"
    )
    rules: list[RuleFacts] = Field(description="the rules that ran")
    off: list[str] = Field(description="rules that the policy or --select turned off")
    warnings: Warnings
    run: Run
    reasons: dict[str, str] = Field(description="why each field that is null has no value, by the field's name")


class Problem(Result):
    """The error because of which there is no verdict."""

    kind: Literal["input", "checkpoint", "unsupported", "memory", "stopped", "internal"] = Field(
        description="what the error lies in: an option or a file beside the checkpoint (input); the checkpoint's "
        "files; a model without a proven form (unsupported); memory; a signal (stopped); a fault of duat itself "
        "(internal)"
    )
    message: str = Field(description="text of the error, one line, as on standard error")
    exit_code: int = Field(description="exit code of a check without a verdict: 2, or 130 and 143 on signals")


class UndecidedReport(Report):
    """`duat check` without a verdict."""

    command: Annotated[Literal["check"], COMMAND] = "check"
    verdict: Literal["undecided"] = Field(
        description="'undecided': the check could not tell whether the checkpoint passes"
    )
    model: str | None = Field(description="the model, as it was named; null for the bundled demo")
    error: Problem
