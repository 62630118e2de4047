"""`duat plan`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from duat_cli import __version__
from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_SOUND, EXIT_UNDECIDED, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.opening import Found
    from duat_cli.analysis.plan.run import Plan
    from duat_cli.results.plan import PlanReport

TOKENS_LIMIT = 1_000_000  # prompts; more would only fill the memory

For = Annotated[
    Literal["inspect", "verify", "matrix"],
    typer.Option("--for", metavar="COMMAND", rich_help_panel=options.PANEL_COMPUTE, help="inspect, verify or matrix."),
]
Null = Annotated[
    Literal["all", "uniform"],
    typer.Option("--null", metavar="WHICH", rich_help_panel=options.PANEL_COMPUTE, help="As of duat inspect."),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="LIST",
        rich_help_panel=options.PANEL_INPUT,
        help="In place of texts, their numbers of tokens, such as 512 or 100x32,2048; no tokenizer is read.",
    ),
]


def plan(
    model: options.Model = None,
    command: For = "inspect",
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    tokens: Tokens = None,
    null: Null = "all",
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """How much memory a command will take on the CPU, and whether its weights fit or are read block by block.

    From config.json and the headers of the weight files alone. Exit code: 0 it can run, 2 it cannot.
    """
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.terminal.progress import Progress

    limit = options.parse_memory(memory)
    wanted = ModelRequest(
        model, revision, token, cache_dir, False, dtype, "cpu", limit, command, command == "inspect" and null == "all"
    )
    texts = PromptRequest(prompt, prompts, max_tokens)
    if tokens is not None and texts.own:
        raise InputError("--tokens stands in place of texts: give it without --prompt and --prompts")
    given = _parse_tokens(tokens)
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of(output, form, json, no_color)
    clock = Clock()

    announce(model, talk)
    with Progress(talk) as progress:
        if given is None:
            read = texts.read(progress)
            found = wanted.find(progress)
            counts = texts.counts(found, read, trust_remote_code=False)
        else:
            found = wanted.find(progress)
            counts = [min(count, max_tokens or count) for count in given]
        made = wanted.plan(found, command, counts, limit)

    from duat_cli.report.tables.plan import render_plan

    presentation.emit(_report(made, found, command, counts, clock), render_plan, talk)
    return EXIT_UNDECIDED if made.chosen is None else EXIT_SOUND


def _parse_tokens(text: str | None) -> list[int] | None:
    """'2x32,512' as [32, 32, 512]; None stays None."""
    if text is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,7})x)?(\d{1,7})\s*", part, re.ASCII)
        if match is None or int(match[2]) == 0:
            raise InputError(f"--tokens '{text}': '{part}' is no number of tokens; expected such as 512 or 100x32")
        times = int(match[1] or 1)
        if len(counts) + times > TOKENS_LIMIT:
            raise InputError(f"--tokens '{text}': more than {TOKENS_LIMIT} prompts")
        counts += [int(match[2])] * times
    if not counts:
        raise InputError(f"--tokens '{text}': no prompt")
    return counts


def _report(
    made: Plan, found: Found, command: Literal["inspect", "verify", "matrix"], counts: list[int], clock: Clock
) -> PlanReport:
    from duat_cli.results.plan import PlanReport

    return PlanReport(
        duat_version=__version__,
        planned_command=command,
        name=found.place.name,
        dtype=made.shape.dtype,
        prompt_tokens=counts,
        weights=made.weights(),
        operations=made.operations,
        limit_bytes=made.limit,
        ways=list(made.ways),
        chosen=None if made.chosen is None else made.chosen.weights,
        reason=made.reason,
        warnings=list(found.files.warnings),
        run=clock.run(),
    )
