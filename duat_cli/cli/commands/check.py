"""`duat check`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError, NoSignalError, UnsupportedModelError

if TYPE_CHECKING:
    from duat_cli.checks.conclude import CheckPlan, Subject
    from duat_cli.checks.rule import Evidence, Need
    from duat_cli.cli.shared.session import Found, ModelOptions, PromptOptions
    from duat_cli.cli.terminal.clock import Clock
    from duat_cli.cli.terminal.output import Target
    from duat_cli.cli.terminal.progress import Progress
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt, PromptText
    from duat_cli.results.check import CheckReport
    from duat_cli.results.lora import LintFinding
    from duat_cli.results.prune import PruneReport

PANEL_CHECK = "What to check"
CheckForm = Literal["table", "json", "junit", "github", "markdown", "sarif"]
_SUFFIXES: dict[str, CheckForm] = {".json": "json", ".xml": "junit", ".md": "markdown", ".sarif": "sarif"}

PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        rich_help_panel=PANEL_CHECK,
        help="A TOML file, a pyproject.toml with [tool.duat], or a shipped policy: default, strict, release, adapter. "
        "Default: [tool.duat] of ./pyproject.toml if it has one, else 'default'.",
    ),
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        rich_help_panel=PANEL_CHECK,
        help="Compare with this baseline; what moved beyond its tolerance fails.",
    ),
]
UpdateOption = Annotated[
    bool,
    typer.Option(
        "--update-baseline",
        metavar="",
        rich_help_panel=PANEL_CHECK,
        help="Write the baseline anew, and say what changed; not where a check fails.",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        rich_help_panel=PANEL_CHECK,
        help="Also check a PEFT adapter of this model: the rules adapter.*.",
    ),
]
SelectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="RULE",
        rich_help_panel=PANEL_CHECK,
        help="Only these rules, such as 'integrity.*'; repeatable.",
    ),
]
WeightsOnly = Annotated[
    bool,
    typer.Option(
        "--weights-only",
        metavar="",
        rich_help_panel=PANEL_CHECK,
        help="Only what the files say: no tokenizer, no forward pass, no torch.",
    ),
]
FormOption = Annotated[
    CheckForm | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        show_default=False,
        rich_help_panel=options.PANEL_OUTPUT,
        help="table, json, junit, github (annotations), markdown or sarif. Default: by the suffix of the output file "
        "(.json .xml .md .sarif), else table.",
    ),
]
ReportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--report",
        metavar="FORMAT=FILE",
        rich_help_panel=options.PANEL_OUTPUT,
        help="Also write this report, such as sarif=duat.sarif; repeatable.",
    ),
]


def check(
    model: options.Model = None,
    policy: PolicyOption = None,
    baseline: BaselineOption = None,
    update_baseline: UpdateOption = False,
    weights_only: WeightsOnly = False,
    adapter: AdapterOption = None,
    select: SelectOption = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    device: options.Device = "auto",
    dtype: options.DtypeOption = "float32",
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: FormOption = None,
    json: options.Json = False,
    output: options.Output = None,
    report: ReportOption = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """A gate: is the checkpoint sound, does it keep a policy's bounds, and did it drift from its baseline?

    Exit code: 0 all checks passed (warnings allowed), 1 a check failed, 2 could not tell.
    """
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.shared.session import ModelOptions, PromptOptions
    from duat_cli.cli.terminal.clock import Clock
    from duat_cli.cli.terminal.output import Target
    from duat_cli.cli.terminal.progress import Progress

    clock = Clock()
    _refuse_no_model(model)
    wanted = ModelOptions(model, revision, token, cache_dir, trust_remote_code, dtype, device)
    texts = PromptOptions(prompt, prompts, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    chosen = _form(form, json, output)
    presentation = Presentation.of(output, "json" if chosen == "json" else "table", False, no_color)
    outlets = [_Outlet(chosen, presentation.target), *_outlets(report or [])]
    plan = _plan(policy, select or [], baseline, update_baseline, weights_only, dtype)
    file = Target.of("--baseline", baseline) if update_baseline else None
    _refuse_shared(outlets, file)

    with Progress(talk) as progress:
        result, text = _check(plan, wanted, texts, adapter, talk, progress, clock)
        if file is not None and text is not None:
            file.write(text)

    from duat_cli.report.check.forms import render

    for outlet in outlets:
        outlet.target.write(render(result, outlet.form, presentation.page()))
        if outlet.target.path is not None:
            talk.note(f"wrote {outlet.target.path}")
    return EXIT_SOUND if result.verdict == "passed" else EXIT_FINDINGS


def _refuse_no_model(model: str | None) -> None:
    """A job whose variable is empty would pass, on the bundled demo."""
    if model is None and any(os.environ.get(name) for name in ("CI", "PRE_COMMIT")):
        raise InputError("MODEL missing: a gate does not fall back to the bundled demo; give a folder or a hub id")


@dataclass(frozen=True)
class _Outlet:
    form: CheckForm
    target: Target


def _form(form: CheckForm | None, json: bool, output: str | None) -> CheckForm:
    if json and form not in (None, "json"):
        raise InputError(f"--json and --format {form} contradict each other; give one of them")
    suffix = "" if output is None else output[output.rfind(".") :] if "." in output else ""
    return form or ("json" if json else _SUFFIXES.get(suffix, "table"))


def _outlets(wanted: list[str]) -> list[_Outlet]:
    from duat_cli.cli.terminal.output import Target

    found = []
    for text in wanted:
        form, equals, name = text.partition("=")
        if form not in get_args(CheckForm) or not equals or not name or name == "-":
            forms = ", ".join(get_args(CheckForm))
            raise InputError(f"--report '{text}': expected FORMAT=FILE, such as sarif=duat.sarif; formats: {forms}")
        found.append(_Outlet(cast(CheckForm, form), Target.of_text("--report", name)))
    return found


def _refuse_shared(outlets: list[_Outlet], file: Target | None) -> None:
    """Two results in one file would leave one of them."""
    targets = [target for target in (*(o.target for o in outlets), file) if target is not None]
    paths = [t.path.resolve() for t in targets if t.path is not None]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"'{twice}' is named twice, by --output, --report or --baseline; give each a file of its own")


def _plan(
    policy: str | None, select: list[str], baseline: str | None, update: bool, weights_only: bool, dtype: str
) -> CheckPlan:
    from duat_cli.checks.conclude import plan
    from duat_cli.checks.policy import read_policy
    from duat_cli.checks.settings import settings_of

    found = read_policy(policy)
    return plan(found, settings_of(found, select), baseline, update, weights_only, dtype)


def _check(
    plan: CheckPlan,
    wanted: ModelOptions,
    texts: PromptOptions,
    adapter: str | None,
    talk: Talk,
    progress: Progress,
    clock: Clock,
) -> tuple[CheckReport, str | None]:
    from duat_cli.checks.conclude import NO_FORWARD, Subject, conclude
    from duat_cli.checks.rule import Evidence
    from duat_cli.checks.weights import weight_facts
    from duat_cli.loading.model.notes import weight_notes

    wanted.announce(talk)
    read = texts.read(progress) if plan.forward else []
    found = wanted.find(progress)
    undefined: NoSignalError | None = None
    if plan.forward:
        evidence, subject, undefined = _with_model(plan, wanted, found, texts, read, progress)
    else:
        weights = weight_facts(found.files, progress, first_sketch=plan.first_sketch)
        why = NO_FORWARD if plan.weights_only else "no rule that is on needs it"
        absent: dict[Need, str] = dict.fromkeys(("load", "report", "slack"), why)
        evidence = Evidence(found.files, weights, absent=absent)
        notes = weight_notes(weights.nonfinite, weights.zero_matrices, len(weights.matrices))
        subject = Subject(found.place.name, found.place.revision, None, (*found.files.warnings, *notes))
    if adapter is None:
        evidence.absent["adapter"] = "no --adapter was given"
    else:
        evidence = replace(evidence, adapter=_lint(adapter, found, progress))
    result, text = conclude(plan, evidence, subject, clock.run())
    if undefined is not None and result.verdict == "passed":  # no rule on the weights is on that says it
        raise undefined
    return result, text


def _lint(name: str, found: Found, progress: Progress) -> tuple[LintFinding, ...]:
    progress.doing(f"checking the adapter {name}")
    from pathlib import Path

    from duat_cli.analysis.lora.lint import lint_adapter
    from duat_cli.loading.adapter.base_weights import BaseWeights
    from duat_cli.loading.adapter.folder import open_adapter

    opened = open_adapter(Path(name).expanduser(), name)
    with BaseWeights(found.place, found.files) as base:
        return tuple(lint_adapter(opened, base))


def _with_model(
    plan: CheckPlan,
    wanted: ModelOptions,
    found: Found,
    texts: PromptOptions,
    read: list[PromptText],
    progress: Progress,
) -> tuple[Evidence, Subject, NoSignalError | None]:
    """The model loaded and, where its weights are numbers, run; and why the run says nothing, if it does not."""
    from duat_cli.checks.conclude import Subject
    from duat_cli.checks.rule import Evidence
    from duat_cli.checks.weights import weight_facts
    from duat_cli.cli.shared.session import open_found

    try:
        loaded, inputs = open_found(wanted, found, texts, read, progress)
    except UnsupportedModelError as fault:
        raise _with_hint(fault) from fault
    weights = weight_facts(found.files, progress, first_sketch=plan.first_sketch)
    evidence = Evidence(found.files, weights, unexpected=loaded.unexpected, spare=loaded.spare)
    if loaded.nonfinite_weights:
        for need in ("report", "slack"):
            evidence.absent[need] = "weights that are not finite leave nothing to compute"
        return evidence, Subject(loaded.name, loaded.revision, None, loaded.warnings), None
    from duat_cli.analysis.inspect.run import InspectOptions, inspect
    from duat_cli.checks.paths import asks_for

    asked = {o for path, (_, table) in plan.policy.bounds().items() if table.level != "off" for o in asks_for(path)}
    settings = InspectOptions(
        spectrum="spectrum" in asked,
        terms="terms" in asked,
        per_prompt="per_prompt" in asked,
        null="all" if "null" in asked else "uniform",
    )
    try:
        report = inspect(loaded, inputs, settings, progress)
    except NoSignalError as fault:  # the rules on weights say what is zero
        evidence.absent.update({"report": str(fault), "slack": str(fault)})
        return evidence, Subject(loaded.name, loaded.revision, None, loaded.warnings), fault
    except UnsupportedModelError as fault:
        raise _with_hint(fault) from fault
    subject = Subject(loaded.name, loaded.revision, report.model.fingerprint, tuple(report.warnings))
    return replace(evidence, report=report, slack=_slack(plan, loaded, inputs, progress)), subject, None


def _with_hint(fault: UnsupportedModelError) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fault}; --weights-only checks what needs no forward pass")


def _slack(plan: CheckPlan, loaded: LoadedModel, inputs: list[Prompt], progress: Progress) -> PruneReport | None:
    """How much can go, if a rule asks."""
    if not any(s.level != "off" and "slack" in s.rule.needs for s in plan.settings.values()):
        return None
    from duat_cli.analysis.prune.run import PruneOptions, prune_bound

    budget, probes = plan.policy.pruning()
    options = PruneOptions(kinds=("neuron", "head"), probes=probes, measure=0, budget=budget)
    return prune_bound(loaded, inputs, [], options, progress).report
