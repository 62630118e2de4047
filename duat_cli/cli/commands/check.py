"""`duat check`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError

if TYPE_CHECKING:
    from duat_cli.cli.terminal.output import Target

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
    memory: options.Memory = None,
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
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.terminal.output import Target
    from duat_cli.cli.terminal.progress import Progress

    clock = Clock()
    _refuse_no_model(model)
    limit = options.parse_memory(memory)
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, in_parts=True)
    texts = PromptRequest(prompt, prompts, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    chosen = _form(form, json, output)
    presentation = Presentation.of(output, "json" if chosen == "json" else "table", False, no_color)
    outlets = [_Outlet(chosen, presentation.target), *_outlets(report or [])]
    from duat_cli.analysis.check.run import CheckRequest
    from duat_cli.analysis.check.run import check as compute
    from duat_cli.checks.conclude import plan
    from duat_cli.checks.policy import read_policy
    from duat_cli.checks.settings import settings_of

    found = read_policy(policy)
    settled = plan(found, settings_of(found, select or []), baseline, update_baseline, weights_only, dtype)
    file = Target.of("--baseline", baseline) if update_baseline else None
    _refuse_shared(outlets, file)

    announce(model, talk)
    with Progress(talk) as progress:
        result, text = compute(settled, CheckRequest(wanted, texts, adapter), progress, clock.run)
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
