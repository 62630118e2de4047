"""`duat matrix`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from duat_cli.cli import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.matrix import Matrices
    from duat_cli.cli.output import Target
    from duat_cli.cli.session import ModelOptions
    from duat_cli.loading.load import LoadedModel
    from duat_cli.loading.prompts import Prompt
    from duat_cli.results.matrix import MatrixReport

PAPER_PROMPT = "Nui zi created Nui zi dynamics"
SUFFIX = ".safetensors"

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
        help="Also write the matrices to a .safetensors file: dense where small, else their factors.",
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
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: Form = None,
    json: options.Json = False,
    output: MatrixFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """The paper's explicit matrices of one block and one prompt, each step checked against the model.

    Exit code: 0 every check holds, 1 a check fails, 2 could not tell.
    """
    from duat_cli.cli.presentation import Presentation, talk_of
    from duat_cli.cli.progress import Progress
    from duat_cli.cli.session import ModelOptions, PromptOptions, open_session

    wanted = ModelOptions(model, revision, token, cache_dir, trust_remote_code, dtype, device)
    texts = PromptOptions([_only(prompt)], None, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of(None, form, json, no_color)
    target = _target(output)
    if not prompt:
        talk.note(f"no --prompt given: using the paper's '{PAPER_PROMPT}'")

    with Progress(talk) as progress:
        loaded, [text] = open_session(wanted, texts, talk, progress)
        from duat_cli.analysis.matrix import matrix as compute

        found = compute(loaded, text, layer, _token_texts(loaded, text, wanted), progress)
        if target is not None:
            _write(target, found)
            talk.note(f"wrote {target.path}")

    from duat_cli.report.matrix import render_matrix

    presentation.emit(found.report, render_matrix, talk)
    return EXIT_SOUND if _is_sound(found.report) else EXIT_FINDINGS


def _is_sound(report: MatrixReport) -> bool:
    return report.certificate.exact and all(check.holds is not False for check in report.checks)


def _only(prompt: list[str] | None) -> str:
    if prompt and len(prompt) > 1:
        raise InputError(f"--prompt: given {len(prompt)} times; a matrix belongs to one prompt")
    return prompt[0] if prompt else PAPER_PROMPT


def _target(name: str | None) -> Target | None:
    if name is None:
        return None
    from duat_cli.cli.output import Target

    target = Target.of("--output", name)
    if target.path is None or target.path.suffix != SUFFIX:
        raise InputError(f"--output '{name}': expected a file name that ends in {SUFFIX}; the report is on stdout")
    return target


def _token_texts(loaded: LoadedModel, prompt: Prompt, wanted: ModelOptions) -> list[str]:
    """What each token says; a token may be part of a character."""
    from duat_cli.loading.load import load_tokenizer
    from duat_cli.loading.quiet import calling_tokenizer

    tokenizer = load_tokenizer(loaded.files.path, trust_remote_code=wanted.trust_remote_code)
    with calling_tokenizer("--prompt: the tokenizer fails", InputError):
        return [str(tokenizer.decode([i])) for i in prompt.input_ids[0].tolist()]


def _write(target: Target, found: Matrices) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().contiguous() for name, tensor in found.tensors.items()}
    with target.replacing() as part:
        try:
            save_file(tensors, part, metadata=found.metadata)
        except SafetensorError as error:  # it names no file, and hides the reason of the system
            raise InputError(f"--output '{target.path}': cannot write: {error}") from error
