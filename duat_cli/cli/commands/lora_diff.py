"""`duat lora-diff`."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.lora.run import LoraRequest
    from duat_cli.analysis.opening import PromptRequest
    from duat_cli.analysis.progress import Progress as Heard
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.results.lora import LoraReport

Base = Annotated[
    str | None,
    typer.Argument(
        metavar="BASE",
        show_default=False,
        help="The base checkpoint: a folder or a hub id. Without any: the bundled demo and its adapter.",
    ),
]
Tuned = Annotated[
    str | None,
    typer.Argument(
        metavar="TUNED",
        show_default=False,
        help="A PEFT adapter, or a fully tuned checkpoint: a folder, or a hub id (org/name@revision).",
    ),
]
Other = Annotated[
    str | None,
    typer.Argument(metavar="OTHER", show_default=False, help="A second adapter, to compare with the first."),
]
Lint = Annotated[
    bool,
    options.compute_option(
        "--lint", metavar="", help="Only check the adapter for what goes wrong in practice; exit 1 on an error."
    ),
]
NoBase = Annotated[
    bool,
    options.compute_option(
        "--no-base", metavar="", help="Read no tensor of the base: the adapter's own numbers only, in seconds."
    ),
]


Prompts = Annotated[
    list[str] | None,
    options.input_option(
        "--prompt", metavar="TEXT", help="Also run this text through both models; repeatable; - reads standard input."
    ),
]
DefaultPrompts = Annotated[
    bool, options.input_option("--default-prompts", metavar="", help="Also run the bundled texts through both models.")
]
LargeDirections = Annotated[
    bool,
    options.compute_option(
        "--directions",
        metavar="",
        help="Also what takes long for matrices over 1024 wide: intruders and alignment (seconds each), and all "
        "singular values of dense differences (a minute each).",
    ),
]
NoCache = Annotated[
    bool,
    options.compute_option(
        "--no-cache", metavar="", help="Neither read nor write directions of base weights in the cache."
    ),
]


def lora_diff(
    base: Base = None,
    tuned: Tuned = None,
    other: Other = None,
    prompt: Prompts = None,
    prompts: options.PromptsFile = None,
    default_prompts: DefaultPrompts = False,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    lint: Lint = False,
    no_base: NoBase = False,
    directions: LargeDirections = False,
    no_cache: NoCache = False,
    out: options.Out = None,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    form: options.PageFormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """What an adapter, or a full fine-tune, really changed: in the weights, and with prompts in every block.

    Exit code: 0 done, 1 not exact, or with --lint the adapter has an error, 2 could not tell.
    """
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.lora.run import LoraRequest, texts_to_run
    from duat_cli.analysis.lora.run import lora_diff as compute
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.cli.shared.many import as_rank, processes
    from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
    from duat_cli.cli.terminal.progress import Progress

    clock = Clock()
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of_page(output, form, json, no_color, wide=wide)
    texts = texts_to_run(PromptRequest(prompt, prompts, max_tokens, chat=chat), default_prompts=default_prompts)
    limit = options.parse_memory(memory)
    wanted = ModelRequest(base, revision, token, cache_dir, False, dtype, device, limit, device_map=device_map)
    shared = 1 if out is not None else processes()
    request = LoraRequest(wanted, tuned, other, texts, lint, no_base, directions, not no_cache, shared)
    if out is not None:
        found = as_rank(base, _kept(request), functools.partial(_into, request, Path(out), clock), talk)
    else:
        if base is None and texts is None:
            talk.note("no BASE given: using the bundled demo model and its adapter")
        else:
            announce(base, talk)
        with Progress(talk) as progress:
            found = compute(request, progress, clock.run)
    if found is None:
        return EXIT_SOUND  # the first rank has the report
    report = found

    from duat_cli.report.tables.lora import render_lora

    presentation.emit(report, render_lora, talk)
    return EXIT_SOUND if is_sound(report, lint) else EXIT_FINDINGS


def _kept(request: LoraRequest) -> PromptRequest:
    """The prompts whose results are kept."""
    if request.texts is None:
        raise InputError("--out: keeps the results of prompts; give --prompts FILE, or --default-prompts")
    return request.texts


def _into(request: LoraRequest, out: Path, clock: Clock, ranks: Ranks, progress: Heard) -> LoraReport | None:
    from duat_cli.analysis.lora.run import lora_diff as compute
    from duat_cli.analysis.shards.lora import IntoFolder

    max_tokens = None if request.texts is None else request.texts.max_tokens
    into = IntoFolder(out, request.large, max_tokens, ranks, progress)
    return compute(replace(request, into=into), progress, clock.run)


def is_sound(report: LoraReport, lint: bool = False) -> bool:
    """Whether it is exact; lint: whether the adapter may have no error."""
    certified = all(c is None or c.exact for c in (report.certificate, report.tuned_certificate))
    linted = not lint or all(finding.level != "error" for finding in report.lint)
    return certified and linted and (report.eq18 is None or report.eq18.holds is not False)
