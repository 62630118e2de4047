"""`duat check`."""

from __future__ import annotations

import functools
import os

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.many import processes
from duat_cli.cli.shared.outlets import CheckForm, Outlets
from duat_cli.cli.shared.presentation import Target, announce, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError

PANEL_CHECK = "What to check"
check_option = functools.partial(options.option, panel=PANEL_CHECK)


class Asked(Options):
    """What is checked."""

    policy: str | None = check_option(
        metavar="FILE",
        help="A TOML file, a pyproject.toml with [tool.duat], or a shipped policy: default, strict, release, adapter, "
        "fine-tune. Default: [tool.duat] of ./pyproject.toml if it has one, else 'default' ('fine-tune' with --base).",
    )
    baseline: str | None = check_option(
        metavar="FILE", help="Compare with this baseline; what moved beyond its tolerance fails."
    )
    update_baseline: bool = check_option(help="Write the baseline anew and say what changed, unless a check fails.")
    base: str | None = check_option(
        metavar="BASE",
        help="Compare with this checkpoint, a folder or a hub id (org/name@revision), which is checked first; no "
        "baseline file is read or written.",
    )
    weights_only: bool = check_option(
        help="Check only what the files say: no tokenizer, no forward pass, and no torch, except to tell what "
        "tensors of integers are."
    )
    adapter: str | None = check_option(
        metavar="ADAPTER",
        help="Also check a PEFT adapter of this model, a folder or a hub id (org/name@revision), by the rules "
        "adapter.*.",
    )
    select: list[str] | None = check_option(metavar="RULE", help="Only these rules, such as 'integrity.*'; repeatable.")


class Places(Options):
    """Where the results go."""

    form: CheckForm | None = options.format_option(
        help="table, json, junit, github (annotations), markdown, sarif, html (a page with pictures), or for the hub "
        "eval-results (YAML for a model card's metadata) and model-card (a section for it). Default: by the suffix of "
        "the output file (.json .xml .md .sarif .html), else table.",
    )
    json: bool = options.Page.json
    output: str | None = options.Page.output
    report: list[str] | None = options.output_option(
        metavar="FORMAT=FILE", help="Also write this report, such as sarif=duat.sarif; repeatable."
    )
    every: bool = options.output_option(
        False,
        "--all",
        help="List every finding and every effect of a cause, in the table and in Markdown; in the table also what "
        "passed.",
    )


@grouped
def check(
    model: str | None = options.MODEL,
    *,
    asked: Asked,
    texts: options.Texts,
    files: options.OneStack,
    loading: options.Loading,
    places: Places,
    voice: options.Voice,
) -> int:
    """A gate: is the checkpoint sound, does it keep a policy's bounds, and did it drift from its baseline?

    Exit code: 0 all checks passed (warnings allowed), 1 a check failed, 2 could not tell.
    """
    with Outlets(model) as outlets:
        talk = talk_of(voice)
        outlets.open(places.form, places.json, places.output, places.report or [], voice, every=places.every)
        if model is None and any(os.environ.get(name) for name in ("CI", "PRE_COMMIT")):
            # a job whose variable is empty would pass, on the bundled demo
            raise InputError("MODEL missing: a gate does not fall back to the bundled demo; give a folder or a hub id")
        wanted = loading.request(model)
        from duat_cli.analysis.check.against import check_against as compute
        from duat_cli.analysis.check.run import CheckRequest
        from duat_cli.analysis.clock import Clock
        from duat_cli.checks.verdict.conclude import plan

        request = CheckRequest(wanted, texts.request(files.given()), asked.adapter, processes())
        clock = Clock()
        settled = plan(
            asked.policy,
            asked.select or [],
            asked.baseline,
            asked.update_baseline,
            asked.weights_only,
            loading.dtype,
            asked.base,
        )
        file = Target.of("--baseline", asked.baseline) if asked.update_baseline else None
        announce(model, talk)
        with Progress(talk) as progress:
            result, text = compute(settled, request, progress, clock.run)
            if file is not None and text is not None:
                file.write(text)
        outlets.write(result, talk)
    return EXIT_SOUND if result.verdict == "passed" else EXIT_FINDINGS
