"""The plan of a command: the prompts and options that it would have, and what they take."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from duat_cli import __version__
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.api.settings import one_prompt, one_question, or_papers
from duat_cli.errors import CheckpointError, InputError
from duat_cli.kinds import Extra, Patched, Planned
from duat_cli.loading.checkpoint.source import has_tokenizer
from duat_cli.text import clean

if TYPE_CHECKING:
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest
    from duat_cli.analysis.plan.run import Plan
    from duat_cli.analysis.progress import Progress
    from duat_cli.results.plan import PlanReport

SHARING = ("inspect", "verify", "attribute", "prune-bound", "lora-diff", "check")
"""Commands whose prompts several processes may share."""


@dataclass(frozen=True)
class PlanRequest:
    """Request to plan a command."""

    model: ModelRequest
    texts: PromptRequest
    tokens: list[int] | None
    """Numbers of tokens in place of texts."""
    command: Planned
    null: Literal["all", "uniform"]
    tuned: str | None
    default_prompts: bool
    holdout: str | None
    pruning: PruneOptions
    policy: str | None
    select: Sequence[str]
    position: Literal["all"] | None
    steps: int
    fixed: bool
    patch: Patched | None
    """This field and those from `null` on are options of one command each; other commands ignore them."""
    time: bool
    """Whether to measure this machine as well."""
    calibration: str | None = None
    """File of prompts for a repair, in prune-bound."""
    device: str = "cpu"
    """Device that computes."""
    extras: frozenset[Extra] = frozenset()
    """What `inspect` computes on request."""
    processes: int = 1
    """How many processes may share the prompts of a command."""

    def __post_init__(self) -> None:
        one_question(None, None, self.position, self.steps, None)
        own = self.texts.own or self.texts.chat or self.default_prompts
        if self.tokens is not None and (own or self.holdout is not None or self.calibration is not None):
            raise InputError(
                "--tokens stands in place of texts: give it without --prompt, --prompts, --default-prompts, --chat, "
                "--holdout and --calibration"
            )

    @functools.cached_property
    def task(self) -> Task:
        """The task to plan; for `check`, that of the rules that are on."""
        command = self.command
        if command == "check":
            from duat_cli.analysis.check import run
            from duat_cli.checks.verdict.conclude import plan

            rules = plan(self.policy, self.select, None, False, False, self.model.dtype)
            return replace(run.task_of(rules), processes=self.processes)
        return Task(
            command,
            processes=self.processes if command in SHARING else 1,
            reinitialised=command == "inspect" and self.null == "all",
            extras=self.extras if command == "inspect" else frozenset(),
            pruning=self.pruning if command == "prune-bound" else None,
            every_position=command == "attribute" and self.position == "all",
            steps=self.steps if command == "attribute" else 0,
            fixed=command == "compare" and self.fixed,
            patch=command == "compare" and self.patch is not None,
        )

    @property
    def runs(self) -> bool:
        """Whether the command runs the model on prompts."""
        return self.command != "lora-diff" or self.texts.own or self.default_prompts or self.tokens is not None


def plan_report(request: PlanRequest, clock: Clock, progress: Progress) -> PlanReport:
    """The plan of a command, from config.json and the headers of the weight files."""
    from duat_cli.analysis.plan.run import plan
    from duat_cli.loading.prompts import read_prompts

    wanted, texts, given = request.model, _texts(request), request.tokens
    read, apart, _ = texts.read_apart(request.holdout, progress) if given is None and request.runs else ([], [], False)
    if request.task.command == "matrix":
        one_prompt(read)
    option, chat = "--calibration", texts.chat
    fitting = [] if request.calibration is None else read_prompts([], request.calibration, sys.stdin, option, chat=chat)
    found = wanted.find(progress)
    task = request.task
    if task.command == "lora-diff":
        task, template = _of_tuned(request, found, progress)
        texts = replace(texts, template=template)
    if given is None:
        if task.runs and any(text.ids is None for text in read):
            _require_tokenizer(found)
        counter = texts.counter(found, trust_remote_code=False)
        counts = counter(read) if request.runs and task.runs else []
        held_out = counter(apart) if task.command == "prune-bound" else []
        fitted = counter(fitting)
    else:
        counts, held_out, fitted = [min(count, texts.max_tokens or count) for count in given], [], []
    counts = [count + task.steps for count in counts]
    # texts were counted only for a model that reads them
    probe = counts[0] if given and task.runs and not _reads_texts(found) else 0
    task = replace(task, tokens=tuple(counts), held_out=tuple(held_out), calibration=tuple(fitted), probe=probe)
    device, task, memory = _on_device(request, task)
    made = plan(found.files, task, wanted.dtype, memory)
    if task.pruning is not None and task.pruning.repair:  # a repair needs weights in memory
        made = replace(made, ways=tuple(way for way in made.ways if way.weights == "resident"))
    if request.time:
        progress(0, 0, "measuring how fast this machine is")
        made = made.timed(device)
    return _report(made, found, device, clock)


def _texts(request: PlanRequest) -> PromptRequest:
    """The given prompts; without any, the command's own, where these are not the bundled set."""
    texts, task = request.texts, request.task
    if task.command == "matrix":
        return or_papers(texts)
    if task.command == "compare" and not task.fixed and not texts.own:
        from duat_cli.analysis.compare.request import PAPER

        return replace(texts, prompts=list(PAPER), made_up=True)
    return texts


def _on_device(request: PlanRequest, task: Task) -> tuple[str, Task, int | None]:
    """The device, and task and memory as `on_device` gives them. With --memory and without --time, no GPU is needed."""
    device, memory = request.device, request.model.memory
    if device == "cpu" or not task.runs:
        return "cpu", task, memory
    if re.fullmatch("cuda(:[0-9]{1,3})?", device) and memory is not None and not request.time:
        return device, replace(task, processes=1, gpu=True), memory
    from duat_cli.analysis.plan.run import on_device
    from duat_cli.loading.model.load import parse_device

    there = parse_device(device)
    return str(there), *on_device(there, task, memory)


def _require_tokenizer(found: Found) -> None:
    """Raises CheckpointError where texts cannot be counted: there is no tokenizer, or the model reads no texts."""
    path = clean(str(found.place.path))
    told = "give --tokens N, for a model of images or sound its number of patches or frames"
    if not has_tokenizer(found.place.path):
        raise CheckpointError(f"{path}: no tokenizer to count the tokens of texts with; {told}")
    if not _reads_texts(found):
        raise CheckpointError(f"{path}: it reads no texts but images or sound; {told}")


def _reads_texts(found: Found) -> bool:
    """Whether the model reads token ids. True where the folder has a tokenizer and no processor. Otherwise torch is
    imported and the model's class decides; True for an unknown class."""
    from duat_cli.loading.declared.fields import processor

    if has_tokenizer(found.place.path) and not processor(found.place.path):
        return True
    from duat_cli.loading.model.load import class_of
    from duat_cli.models.discovery.modality import class_reads_ids

    try:
        return class_reads_ids(class_of(found.files, False))
    except CheckpointError:
        return True


def _of_tuned(request: PlanRequest, found: Found, progress: Progress) -> tuple[Task, Path]:
    """The task of `lora-diff` by its files, and the folder whose chat template may stand in for the base's."""
    from duat_cli.analysis.lora import run

    place = run.place_of(request.tuned, request.model, progress)
    own = run.task_of(found, place, runs=request.runs)
    return replace(own, processes=request.task.processes), place.path


def _report(made: Plan, found: Found, device: str, clock: Clock) -> PlanReport:
    from duat_cli.results.plan import PlanReport

    return PlanReport(
        duat_version=__version__,
        planned_command=made.task.command,
        name=found.place.name,
        dtype=made.shape.dtype,
        device=device,
        prompt_tokens=list(made.task.tokens),
        weights=made.weights(),
        operations=made.operations,
        limit_bytes=made.limit,
        ways=list(made.ways),
        chosen=None if made.chosen is None else made.chosen.weights,
        reason=made.reason,
        warnings=list(found.files.warnings),
        run=clock.run(),
    )
