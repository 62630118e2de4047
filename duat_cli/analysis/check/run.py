"""`duat check`: what the rules that are on need is looked at, and judged.

torch is imported for a forward pass or an adapter alone: weights are checked without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest, open_found
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.checks.paths import asks_for
from duat_cli.checks.rule import Evidence, Need
from duat_cli.checks.verdict.conclude import NO_FORWARD, CheckPlan, Subject, conclude
from duat_cli.checks.weights import weight_facts
from duat_cli.errors import CheckpointError, NoSignalError, UnsupportedModelError
from duat_cli.loading.model.notes import weight_notes

if TYPE_CHECKING:
    from duat_cli.analysis.inspect.run import InspectOptions
    from duat_cli.analysis.progress import Progress
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt
    from duat_cli.loading.texts import PromptText
    from duat_cli.results.base import Run
    from duat_cli.results.check import CheckReport
    from duat_cli.results.inspect import InspectReport
    from duat_cli.results.lora import LintFinding
    from duat_cli.results.prune.report import PruneReport


@dataclass(frozen=True)
class CheckRequest:
    """Which checkpoint is checked, and on what."""

    model: ModelRequest
    texts: PromptRequest
    adapter: str | None
    """Folder of an adapter of this model, checked as well."""


def check(
    plan: CheckPlan, request: CheckRequest, progress: Progress, run: Callable[[int | None], Run]
) -> tuple[CheckReport, str | None]:
    """The report, and the text of the baseline to write, if one is to be written.

    run: what the report says of the run, of the memory that is planned for it.
    NoSignalError where the forward pass leaves nothing to measure and no rule on the weights that is on says so.
    """
    read = request.texts.read(progress) if plan.forward else []
    found = request.model.find(progress)
    undefined: NoSignalError | None = None
    planned: int | None = None
    if plan.forward:
        evidence, subject, undefined, planned = _with_model(plan, request, found, read, progress)
    else:
        evidence, subject = _without_model(plan, found, progress)
    if request.adapter is None:
        evidence.absent["adapter"] = "no --adapter was given"
    else:
        evidence = replace(evidence, adapter=_lint(request.adapter, found, progress))
    report, text = conclude(plan, evidence, subject, run(planned))
    if undefined is not None and report.verdict == "passed":
        raise undefined
    return report, text


def _without_model(plan: CheckPlan, found: Found, progress: Progress) -> tuple[Evidence, Subject]:
    weights = weight_facts(found.files, progress, first_sketch=plan.first_sketch)
    why = NO_FORWARD if plan.weights_only else "no rule that is on needs it"
    absent: dict[Need, str] = dict.fromkeys(("load", "report", "slack"), why)
    notes = weight_notes(weights.nonfinite, weights.zero_matrices, len(weights.matrices))
    subject = Subject(found.place.name, found.place.revision, None, (*found.files.warnings, *notes))
    return Evidence(found.files, weights, absent=absent), subject


def _with_model(
    plan: CheckPlan, request: CheckRequest, found: Found, read: list[PromptText], progress: Progress
) -> tuple[Evidence, Subject, NoSignalError | None, int | None]:
    """The model loaded and, where its weights are numbers, run; why the run says nothing, if it does not; and the
    memory that was planned."""
    try:
        loaded, inputs = open_found(replace(request.model, task=task_of(plan)), found, request.texts, read, progress)
    except UnsupportedModelError as fault:
        raise _with_hint(fault) from fault
    weights = weight_facts(found.files, progress, first_sketch=plan.first_sketch)
    evidence = Evidence(found.files, weights, unexpected=loaded.unexpected, spare=loaded.spare)
    report, undefined = _report(plan, loaded, inputs, progress)
    if report is None:  # the rules on weights say what is zero, or not finite
        why = str(undefined or "weights that are not finite leave nothing to compute")
        evidence.absent.update({"report": why, "slack": why})
        warnings = (*loaded.warnings, *loaded.value_notes())
        return evidence, Subject(loaded.name, loaded.revision, None, warnings), undefined, loaded.planned_memory
    subject = Subject(loaded.name, loaded.revision, report.model.fingerprint, tuple(report.warnings))
    evidence = replace(evidence, report=report, slack=_slack(plan, loaded, inputs, progress))
    return evidence, subject, None, loaded.planned_memory


def _report(
    plan: CheckPlan, loaded: LoadedModel, inputs: list[Prompt], progress: Progress
) -> tuple[InspectReport | None, NoSignalError | None]:
    """The model run on the prompts; none where its weights are not finite, or where the error says why.

    Of weights that are read block by block it is known behind the run alone whether they are.
    """
    from duat_cli.analysis.inspect.run import inspect

    found: InspectReport | None = None
    fault: UnsupportedModelError | CheckpointError | None = None
    if not loaded.nonfinite_weights:
        try:
            found = inspect(loaded, inputs, _settings(plan), progress)
        except (UnsupportedModelError, CheckpointError) as raised:
            fault = raised
    loaded.value_notes()
    if loaded.nonfinite_weights:
        return None, None
    if fault is None or isinstance(fault, NoSignalError):
        return found, fault
    if isinstance(fault, UnsupportedModelError):
        raise _with_hint(fault) from fault
    raise fault


def _with_hint(fault: UnsupportedModelError) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fault}; --weights-only checks what needs no forward pass")


def _settings(plan: CheckPlan) -> InspectOptions:
    """What the bounds that are on ask for beyond the default."""
    from duat_cli.analysis.inspect.run import InspectOptions

    asked = _asked(plan)
    return InspectOptions(
        spectrum="spectrum" in asked,
        terms="terms" in asked,
        per_prompt="per_prompt" in asked,
        null="all" if "null" in asked else "uniform",
    )


def _asked(plan: CheckPlan) -> set[str]:
    """Options of `inspect` that bounds which are on need."""
    return {o for path, (_, table) in plan.policy.bounds().items() if table.level != "off" for o in asks_for(path)}


def task_of(plan: CheckPlan) -> Task:
    """What is planned of it."""
    if not plan.forward:
        return Task("check", runs=False)
    return Task("check", reinitialised="null" in _asked(plan), pruning=_pruning(plan))


def _pruning(plan: CheckPlan) -> PruneOptions | None:
    """Of the rules that ask how much can go."""
    if not any(s.level != "off" and "slack" in s.rule.needs for s in plan.settings.values()):
        return None
    budget, probes = plan.policy.pruning()
    return PruneOptions(kinds=("neuron", "head"), probes=probes, measure=0, budget=budget)


def _slack(plan: CheckPlan, loaded: LoadedModel, inputs: list[Prompt], progress: Progress) -> PruneReport | None:
    """How much can go, if a rule asks."""
    options = _pruning(plan)
    if options is None:
        return None
    from duat_cli.analysis.prune.run import prune_bound

    return prune_bound(loaded, inputs, [], options, progress).report


def _lint(name: str, found: Found, progress: Progress) -> tuple[LintFinding, ...]:
    progress(0, 0, f"checking the adapter {name}")
    from duat_cli.analysis.lora.lint import lint_adapter
    from duat_cli.loading.adapter.base_weights import BaseWeights
    from duat_cli.loading.adapter.folder import open_adapter

    opened = open_adapter(Path(name).expanduser(), name)
    with BaseWeights(found.place, found.files) as base:
        return tuple(lint_adapter(opened, base))
