"""`duat matrix`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.text import PAPER_PROMPT

if TYPE_CHECKING:
    from duat_cli.results.matrix import MatrixReport

Layer = Annotated[
    int,
    typer.Option("--layer", metavar="I", min=0, rich_help_panel=options.PANEL_INPUT, help="The block, counted from 0."),
]
OnePrompt = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        rich_help_panel=options.PANEL_INPUT,
        help="The text to run; - reads standard input. Without it: the paper's own.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "--tokens",
        metavar="N",
        min=1,
        rich_help_panel=options.PANEL_INPUT,
        help="Cut the prompt after N tokens.",
    ),
]
MatrixFile = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        rich_help_panel=options.PANEL_OUTPUT,
        help="Also write W' by its factors (H, V, O, scales), C, the input, what attention adds and the tokens to a "
        ".safetensors file, as duat inspect --matrices does. To rebuild W': duat explain operator-file.",
    ),
]
DenseToo = Annotated[
    bool,
    typer.Option(
        "--dense",
        metavar="",
        rich_help_panel=options.PANEL_OUTPUT,
        help="With -o: also W'_HVO, W'_HV and W'_O written out, as far as their sides are at most 4096.",
    ),
]
Form = Annotated[  # unlike other commands', whose FILE holds the report
    options.Format | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        show_default=False,
        rich_help_panel=options.PANEL_OUTPUT,
        help="table or json: the report, on standard output. Default: table.",
    ),
]


def matrix(
    model: options.Model = None,
    layer: Layer = 0,
    prompt: OnePrompt = None,
    max_tokens: MaxTokens = None,
    device: options.Device = "auto",
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: Form = None,
    json: options.Json = False,
    output: MatrixFile = None,
    dense: DenseToo = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """The paper's explicit matrices of one block and one prompt, each step checked against the model.

    Exit code: 0 every check holds, 1 a check fails, 2 could not tell.
    """
    from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_session
    from duat_cli.analysis.plan.task import Task
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.shared.tensor_target import operator_file, tensor_target, token_texts
    from duat_cli.cli.terminal.progress import Progress

    limit = options.parse_memory(memory)
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, Task("matrix"))
    texts = PromptRequest([_only(prompt)], None, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of(None, form, json, no_color)
    target = tensor_target("--output", output)
    if dense and target is None:
        raise InputError("--dense: writes W' to a file; give -o FILE as well")
    if not prompt:
        talk.note(f"no --prompt given: using the paper's '{PAPER_PROMPT}'")

    announce(model, talk)
    with Progress(talk) as progress:
        loaded, [text] = open_session(wanted, texts, progress)
        from duat_cli.analysis.matrix.run import matrix as compute

        decode = token_texts(loaded, trust_remote_code)
        with operator_file(target, loaded, trust_remote_code) as file:
            report = compute(loaded, text, layer, decode, progress, file, dense=dense)
        if target is not None:
            talk.note(f"wrote {target.path}")

    from duat_cli.report.tables.matrix import render_matrix

    presentation.emit(report, render_matrix, talk)
    return EXIT_SOUND if _is_sound(report) else EXIT_FINDINGS


def _is_sound(report: MatrixReport) -> bool:
    return report.certificate.exact and all(check.holds is not False for check in report.checks)


def _only(prompt: list[str] | None) -> str:
    if prompt and len(prompt) > 1:
        raise InputError(f"--prompt: given {len(prompt)} times; a matrix belongs to one prompt")
    return prompt[0] if prompt else PAPER_PROMPT
