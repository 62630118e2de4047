"""`duat check`: gathers the evidence that the active rules need, and judges it.

torch is imported only for a forward pass or an adapter, so that weights are checked without waiting for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from duat_cli.analysis.check.integers import tables
from duat_cli.analysis.check.reading import asked_hash, made_hash
from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest, Reading, open_reading
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.checks.baseline import prompt_set, weight_metrics
from duat_cli.checks.drift import refuse_foreign, refuse_other_type
from duat_cli.checks.paths import asks_for
from duat_cli.checks.rule import Evidence, Need
from duat_cli.checks.verdict.conclude import NO_FORWARD, CheckPlan, Subject, conclude, refuse_unheld
from duat_cli.checks.weights import weight_facts
from duat_cli.errors import (
    CheckpointError,
    DuatError,
    ForwardError,
    InputError,
    NoSignalError,
    NotFiniteError,
    UnsupportedModelError,
    is_out_of_memory,
)
from duat_cli.loading.checkpoint.index import ADAPTER_CONFIG
from duat_cli.loading.declared import fields
from duat_cli.loading.declared.embedder import embedder
from duat_cli.loading.declared.facts import Declared
from duat_cli.loading.declared.per_layer import Override, overrides
from duat_cli.loading.declared.tokenizer import tokenizer_facts
from duat_cli.loading.model.notes import weight_notes
from duat_cli.results.prompts import set_of

if TYPE_CHECKING:
    from duat_cli.analysis.check.behaviour import Asking
    from duat_cli.analysis.clock import RunFacts
    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.progress import Progress
    from duat_cli.loading.adapter.folder import AdapterFiles
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt
    from duat_cli.loading.texts import PromptText
    from duat_cli.results.behaviour import TunedBehaviour
    from duat_cli.results.check import CheckReport
    from duat_cli.results.inspect import InspectReport
    from duat_cli.results.lora import LintFinding
    from duat_cli.results.prune.report import PruneReport

NO_ADAPTER = "no --adapter was given"
NO_TEXT = "the model reads no text here"
NO_TOKENIZER = "the checkpoint has no tokenizer"


@dataclass(frozen=True)
class CheckRequest:
    """The checkpoint to check, and the inputs to check it on."""

    model: ModelRequest
    texts: PromptRequest
    adapter: str | None
    """Folder or hub id of an adapter of this model, which is checked, too."""
    processes: int = 1
    """How many processes may share the prompts."""


@dataclass(frozen=True)
class Ran:
    """A model with the results of running it."""

    loaded: LoadedModel
    report: InspectReport | None = None
    """None where weights are not finite, or where `fault` is the reason."""
    fault: DuatError | None = None
    asking: Asking | None = None
    """The model's answers; None where there is no report, or where no rule needs them."""


def check(
    plan: CheckPlan,
    request: CheckRequest,
    progress: Progress,
    run: RunFacts,
    read: list[PromptText] | None = None,
    found: Found | None = None,
) -> tuple[CheckReport, str | None]:
    """The report, and the text of the baseline to write, if one is to be written.

    run: makes the report's facts on the run, given the planned memory; read, found: the texts and the model, if they
    are read and found already.

    Raises InputError where the prompts cannot be tokenized, ForwardError where the model cannot run, and NoSignalError
    where the pass leaves nothing to measure, unless a rule that needs none of these reports it.
    """
    refuse_unheld(plan, request.adapter)
    refuse_prompts(plan, request.texts)
    if read is None:
        read = request.texts.read(progress) if plan.forward else []
    found = found or request.model.find(progress)
    if plan.baseline is not None:
        refuse_other_type(plan.baseline.where, plan.baseline.content.model, found.files)
    adapter = _adapter(request, progress)
    if adapter is not None:
        request = replace(request, texts=replace(request.texts, template=adapter.path))
    facts: RunFacts = run
    ran: Ran | None = None
    if plan.forward:
        evidence, subject, ran = _with_model(plan, request, found, read, progress)
        facts = functools.partial(run, ran.loaded.planned_memory, device=ran.loaded.device)
    else:
        evidence, subject = _without_model(plan, request, found, progress)
    if adapter is None:
        evidence.absent["adapter"] = NO_ADAPTER
    else:
        at = str(adapter.path / ADAPTER_CONFIG)
        evidence = replace(evidence, adapter=_lint(adapter, found, progress), adapter_file=at)
    if ran is not None:
        evidence = with_answers(evidence, ran, None if adapter is None else _tuned(adapter, found, ran, progress))
    ran_in = [one.run.peak_memory_bytes or 0 for one in (evidence.report, evidence.slack) if one is not None]
    report, text = conclude(plan, evidence, subject, facts(shared=max(ran_in, default=0)))
    if ran is not None and ran.fault is not None and (plan.update or report.verdict == "passed"):
        raise ran.fault
    return report, text


def refuse_prompts(plan: CheckPlan, texts: PromptRequest) -> None:
    """Raises InputError for prompts, and for options on how to read them, if the plan only looks at files."""
    given = {
        "--prompt": texts.prompts,
        "--prompts": texts.file,
        "--max-tokens": texts.max_tokens,
        "--chat": texts.chat,
        (texts.files and texts.files.option) or "": texts.files and texts.files.option,
    }
    if plan.weights_only and (option := next((name for name, value in given.items() if value), None)) is not None:
        raise InputError(f"--weights-only and {option} contradict each other: no prompt runs; leave one of them out")


def _without_model(
    plan: CheckPlan, request: CheckRequest, found: Found, progress: Progress
) -> tuple[Evidence, Subject]:
    weights = weight_facts(found.files, progress, first_sketch=plan.first_sketch)
    why = NO_FORWARD if plan.weights_only else "no rule that is on needs it"
    absent: dict[Need, str] = dict.fromkeys(("load", "report", "slack", "behaviour", "tokenizer"), why)
    notes = weight_notes(weights.nonfinite, weights.zero_matrices, len(weights.matrices))
    subject = Subject(found.place.name, found.place.revision, None, (*found.files.warnings, *notes))
    known = tables(found.files, request.model.trust_remote_code)
    declared = _said(found, fields.generation(found.files.path))
    return Evidence(found.files, weights, known, absent=absent, declared=declared), subject


def _with_model(
    plan: CheckPlan, request: CheckRequest, found: Found, read: list[PromptText], progress: Progress
) -> tuple[Evidence, Subject, Ran]:
    """Loads the model and, if its weights are finite, runs it."""
    model = replace(request.model, task=replace(task_of(plan), processes=request.processes))
    try:
        reading = open_reading(model, found, request.texts, read, progress)
    except UnsupportedModelError as fault:
        raise _with_hint(fault) from fault
    loaded, inputs = reading.loaded, reading.inputs
    declared = _declared(found, reading, request, read)
    weights = weight_facts(found.files, progress, first_sketch=plan.first_sketch)
    known = tables(found.files, request.model.trust_remote_code)
    evidence = Evidence(found.files, weights, known, unexpected=loaded.unexpected, spare=loaded.spare)
    files = request.texts.files
    written = files is not None and files.stack == "decoder" and files.decoder_prompt is None
    evidence = replace(evidence, overrides=_overrides(loaded), written=written)
    if reading.tokenizer is None:
        evidence.absent["tokenizer"] = NO_TEXT if loaded.like is not None else NO_TOKENIZER
    ran = Ran(loaded, fault=reading.fault)  # the rule on the tokenizer may say why
    if ran.fault is None:
        declared = replace(declared, tokens=made_hash(inputs))
        if plan.baseline is not None and not plan.update and not weights.nonfinite:  # before the passes
            from duat_cli.analysis.session import prompt_facts

            metrics, asked = weight_metrics(weights, plan.schema), prompt_set(set_of(prompt_facts(inputs)), declared)
            refuse_foreign(plan.baseline, found.files, weights, metrics, loaded.dtype, asked)
        ran = run_of(plan, settings(plan), loaded, inputs, reading.tokenizer, progress)
    return *seen(plan, replace(evidence, declared=declared), ran, inputs, progress), ran


def seen(
    plan: CheckPlan, evidence: Evidence, ran: Ran, inputs: list[Prompt], progress: Progress
) -> tuple[Evidence, Subject]:
    """The evidence with the results of the run, or with the reasons why there are none."""
    loaded, report = ran.loaded, ran.report
    if report is None:  # rules on weights report which are zero or not finite
        why = str(ran.fault or "weights that are not finite leave nothing to compute")
        evidence.absent.update({"report": why, "slack": why, "behaviour": why})
        overflow = str(ran.fault) if isinstance(ran.fault, NotFiniteError) else None
        evidence = replace(evidence, silent=isinstance(ran.fault, NoSignalError), overflow=overflow)
        return evidence, Subject(loaded.name, loaded.revision, None, (*loaded.warnings, *loaded.value_notes()))
    if loaded.like is not None:
        evidence.absent["slack"] = "terms are ablated where token ids alone are read"
    if ran.asking is None:
        evidence.absent["behaviour"] = "no rule that is on needs it"
    told = report.model
    subject = Subject(loaded.name, loaded.revision, told.fingerprint, tuple(report.warnings), told.stack)
    return replace(evidence, report=report, slack=_slack(plan, loaded, inputs, progress)), subject


def run_of(
    plan: CheckPlan,
    options: InspectOptions,
    loaded: LoadedModel,
    inputs: list[Prompt],
    tokenizer: Any,
    progress: Progress,
) -> Ran:
    """Runs the model on the prompts.

    For weights that are read block by block, it is only known after the run whether they are finite.
    """
    from duat_cli.analysis.check.behaviour import Asking
    from duat_cli.analysis.inspect.options import Filled
    from duat_cli.analysis.inspect.run import inspect

    asking = Asking(tokenizer) if plan.asks else None
    found: InspectReport | None = None
    fault: UnsupportedModelError | CheckpointError | None = None
    if not loaded.nonfinite_weights:
        try:
            found = inspect(loaded, inputs, options, progress, Filled(beside=asking))
        except (UnsupportedModelError, CheckpointError) as raised:
            fault = raised
        except (RuntimeError, ValueError, TypeError, LookupError) as raised:
            from duat_cli.analysis.own_fault import own_fault

            fault = None if is_out_of_memory(raised) else own_fault(loaded, [p.given for p in inputs])
            if fault is None:
                raise
    loaded.value_notes()
    if loaded.nonfinite_weights:
        return Ran(loaded)
    if fault is None:
        return Ran(loaded, found, asking=asking)
    if isinstance(fault, (NoSignalError, NotFiniteError, ForwardError)):
        return Ran(loaded, fault=fault)
    if isinstance(fault, UnsupportedModelError):
        return Ran(loaded, fault=_with_hint(fault))
    raise fault


def _overrides(loaded: LoadedModel) -> tuple[Override, ...]:
    """Declarations for single layers, judged by whether the model obeys them."""
    from duat_cli.analysis.check.obeyed import judged

    if loaded.stack is not None or loaded.chain is not None:  # declarations are for the whole model
        return ()
    return judged(loaded, overrides(loaded.files.config))


def _tuned(adapter: AdapterFiles, found: Found, ran: Ran, progress: Progress) -> TunedBehaviour | None:
    if ran.asking is None:
        return None
    from duat_cli.analysis.check.behaviour import tuned_behaviour

    progress(0, 0, f"the model with the adapter {adapter.name}")
    return tuned_behaviour(adapter, found, ran.loaded, ran.asking)


def with_answers(evidence: Evidence, ran: Ran, tuned: TunedBehaviour | None = None) -> Evidence:
    """The evidence with the model's answers. tuned: its behaviour with an adapter applied."""
    if ran.asking is None:
        return evidence
    behaviour, answers = ran.asking.found(tuned)
    if not behaviour.predictions:
        evidence.absent["predictions"] = behaviour.reasons["loss_per_token"]
    if behaviour.loss_per_token is None:
        evidence.absent["tuned"] = behaviour.reasons["loss_per_token"]
    return replace(evidence, behaviour=behaviour, answers=answers)


def _said(found: Found, generation: dict[str, Any]) -> Declared:
    """Declarations in the files alone. generation: the content of generation_config.json."""
    path, stated = found.files.path, fields.flat(found.files.config)
    return Declared(stated, fields.flat(generation), embedder=embedder(path), processor=fields.processor(path))


def _declared(found: Found, reading: Reading, request: CheckRequest, read: list[PromptText]) -> Declared:
    """Declarations in the files, with defaults and facts on the tokenizer."""
    import transformers

    from duat_cli.compat.generation import generation_defaults, generation_fault, sampling_fault
    from duat_cli.loading.prompts import limits

    stated, tokenizer = fields.generation(found.files.path), reading.tokenizer
    texts = [text.text for text in read if text.ids is None]
    return replace(
        _said(found, stated),
        resolved=fields.resolved(reading.loaded.model.config),
        resolved_by=transformers.__version__,
        generation_defaults=generation_defaults(),
        generation_fault=generation_fault(stated),
        sampling_fault=sampling_fault(stated),
        tokenizer=None if tokenizer is None else tokenizer_facts(tokenizer, found.files.path, texts),
        rows=None if tokenizer is None else limits(reading.loaded.model).vocab_size,
        texts=asked_hash(request.texts, read),
    )


def _with_hint(fault: UnsupportedModelError) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fault}; --weights-only checks what needs no forward pass")


def settings(plan: CheckPlan, also: Iterable[str] = (), *, cache: bool = True) -> InspectOptions:
    """Options of `inspect` that the active bounds need. also: further options."""
    from duat_cli.analysis.inspect.options import InspectOptions

    asked = _asked(plan).union(also)
    return InspectOptions(
        spectrum="spectrum" in asked,
        terms="terms" in asked,
        end_to_end="end_to_end" in asked,
        routing="routing" in asked,
        heads="heads" in asked,
        per_prompt="per_prompt" in asked,
        null="all" if "null" in asked else "uniform",
        cache=cache,
    )


def _asked(plan: CheckPlan) -> set[str]:
    """Names of the options of `inspect` that the active bounds need."""
    return {o for path, (_, table) in plan.policy.bounds().items() if table.level != "off" for o in asks_for(path)}


def task_of(plan: CheckPlan) -> Task:
    """The task to be planned for a check."""
    if not plan.forward:
        return Task("check", runs=False)
    return Task("check", reinitialised="null" in _asked(plan), pruning=_pruning(plan))


def _pruning(plan: CheckPlan) -> PruneOptions | None:
    """Options of `prune-bound` for rules on how much can be removed; None without such rules."""
    if not plan.needs("slack"):
        return None
    budget, probes = plan.policy.pruning()
    return PruneOptions(kinds=("neuron", "head"), probes=probes, measure=0, budget=budget)


def _slack(plan: CheckPlan, loaded: LoadedModel, inputs: list[Prompt], progress: Progress) -> PruneReport | None:
    """The report on how much can be removed, if a rule needs it."""
    options = _pruning(plan)
    if options is None or loaded.like is not None:
        return None
    from duat_cli.analysis.prune.run import prune_bound

    return prune_bound(loaded, inputs, [], options, progress).report


def _adapter(request: CheckRequest, progress: Progress) -> AdapterFiles | None:
    """Files of the adapter, read before the model, so that faults in them are reported at once."""
    if request.adapter is None:
        return None
    from duat_cli.loading.adapter.folder import open_adapter
    from duat_cli.loading.adapter.source import find_adapter

    progress(0, 0, f"looking for {request.adapter}")
    place = find_adapter(request.adapter, token=request.model.token, cache_dir=request.model.cache_dir)
    return open_adapter(place.path, place.name)


def _lint(adapter: AdapterFiles, found: Found, progress: Progress) -> tuple[LintFinding, ...]:
    progress(0, 0, f"checking the adapter {adapter.name}")
    from duat_cli.analysis.lora.weights.lint import lint_adapter
    from duat_cli.loading.adapter.base_weights import BaseWeights

    with BaseWeights(found.place, found.files) as base:
        return tuple(lint_adapter(adapter, base))
