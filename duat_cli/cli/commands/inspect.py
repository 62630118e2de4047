"""`duat inspect`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, DuatError, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.inspect.run import InspectOptions
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.cli.shared.presentation import Presentation
    from duat_cli.cli.terminal.output import Target
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.results.inspect import InspectReport

Threshold = Annotated[
    float,
    typer.Option(
        "--threshold",
        metavar="X",
        rich_help_panel=options.PANEL_COMPUTE,
        help="An entry of W' counts for the density above X times the root mean square entry.",
    ),
]
ConvWidth = Annotated[
    int,
    typer.Option(
        "--conv-width",
        metavar="K",
        min=1,
        rich_help_panel=options.PANEL_COMPUTE,
        help="Width of the 1-D convolution that the density is compared with.",
    ),
]
Spectrum = Annotated[
    bool,
    typer.Option(
        "--spectrum",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Also the spectral norm and stable rank of W'.",
    ),
]
Terms = Annotated[
    bool,
    typer.Option(
        "--terms",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Also every UAT term's share of the last output.",
    ),
]
EndToEnd = Annotated[
    bool,
    typer.Option(
        "--end-to-end",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Also how tokens of the first block's input reach the last output through all blocks; as much work as "
        "one more pass a token.",
    ),
]
RoutingOption = Annotated[
    bool,
    typer.Option(
        "--routing",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Also where attention weights come from: W_QK of every head, and what scores are explained by.",
    ),
]
PerPrompt = Annotated[
    bool,
    typer.Option(
        "--per-prompt",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Also the values and spreads over the prompts.",
    ),
]
Matrices = Annotated[
    str | None,
    typer.Option(
        "--matrices",
        metavar="FILE",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Write every block's W' by its factors (H, V, O, scales), C, inputs and tokens to a .safetensors file, "
        "block by block; heads x N x N x 4 bytes a block and prompt of N tokens. To rebuild W': "
        "duat explain operator-file.",
    ),
]
Null = Annotated[
    Literal["all", "uniform"],
    typer.Option(
        "--null",
        metavar="WHICH",
        rich_help_panel=options.PANEL_COMPUTE,
        help="What to compare the statistics of W' with: uniform attention, or all: also the same architecture "
        "re-initialised, which takes a second model's memory, or a second block's where weights are read in parts.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Neither read nor write the cache of Gram matrices and nulls.",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Keep the result of every prompt in a folder: a run that was interrupted goes on there, and processes "
        "started by torchrun, accelerate launch or srun share the prompts. More: duat explain many-prompts.",
    ),
]


def inspect(
    model: options.Model = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    layers: options.Layers = None,
    threshold: Threshold = 0.01,
    conv_width: ConvWidth = 3,
    spectrum: Spectrum = False,
    terms: Terms = False,
    end_to_end: EndToEnd = False,
    routing: RoutingOption = False,
    per_prompt: PerPrompt = False,
    matrices: Matrices = None,
    null: Null = "all",
    out: Out = None,
    no_cache: NoCache = False,
    device: options.Device = "auto",
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """What each block's attention operator does, exactly, and how the network splits into the paper's terms.

    Exit code: 0 exact, 1 the certificate is not exact, 2 could not tell.
    """
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.settings import at_least
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.shared.presentation import Presentation, talk_of

    limit = options.parse_memory(memory)
    task = Task("inspect", reinitialised=null == "all")
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, task)
    texts = PromptRequest(prompt, prompts, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    chosen = options.parse_layers(layers)
    at_least("--threshold", threshold, 0)
    presentation = Presentation.of(output, form, json, no_color, wide=wide)
    matrix_file = _matrix_file(matrices, presentation)

    def settings() -> InspectOptions:
        from duat_cli.analysis.inspect.run import InspectOptions

        return InspectOptions(
            layers=chosen,
            threshold=threshold,
            conv_width=conv_width,
            spectrum=spectrum,
            terms=terms,
            end_to_end=end_to_end,
            routing=routing,
            per_prompt=per_prompt,
            null=null,
            cache=not no_cache,
        )

    if out is not None:
        if matrix_file is not None:
            raise InputError("--out and --matrices contradict each other: matrices are written by one process")
        report = _shared(out, wanted, texts, settings, talk)
        if report is None:
            return EXIT_SOUND  # the first rank has the report
    else:
        announce(model, talk)
        report = _alone(wanted, texts, settings, matrix_file, talk)

    from duat_cli.report.tables.inspect import render_inspect

    presentation.emit(report, render_inspect, talk)
    return EXIT_SOUND if report.certificate.exact else EXIT_FINDINGS


def _alone(
    wanted: ModelRequest,
    texts: PromptRequest,
    settings: Callable[[], InspectOptions],
    matrix_file: Target | None,
    talk: Talk,
) -> InspectReport:
    from duat_cli.analysis.opening import open_session
    from duat_cli.cli.shared.tensor_target import operator_file
    from duat_cli.cli.terminal.progress import Progress

    with Progress(talk) as progress:
        loaded, inputs = open_session(wanted, texts, progress)
        from duat_cli.analysis.inspect.run import inspect as compute

        with operator_file(matrix_file, loaded, wanted.trust_remote_code) as file:
            report = compute(loaded, inputs, settings(), progress, file)
    if matrix_file is not None:
        talk.note(f"wrote {matrix_file.path}")
    return report


def _shared(
    out: str,
    wanted: ModelRequest,
    texts: PromptRequest,
    settings: Callable[[], InspectOptions],
    talk: Talk,
) -> InspectReport | None:
    """Of all processes, in the first of them; None in the others."""
    from duat_cli.analysis.opening import open_set
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.terminal.progress import Progress

    ranks = Ranks.of()
    if ranks.world > 1 and "-" in (texts.file, *(texts.prompts or ())):
        raise InputError("standard input is read by one process; give --prompts a file that all can read")
    talk = talk if ranks.first else replace(talk, quiet=True, verbose=False)
    announce(wanted.model, talk)
    try:
        with Progress(talk) as progress:
            loaded, inputs = open_set(wanted, texts, progress, gpu=ranks.local)
            from duat_cli.analysis.shards.run import inspect_into

            return inspect_into(Path(out), loaded, inputs, settings(), texts.max_tokens, ranks, progress)
    except DuatError as error:
        if ranks.first:
            raise
        raise type(error)(f"{ranks}: {error}") from error


def _matrix_file(name: str | None, presentation: Presentation) -> Target | None:
    from duat_cli.cli.shared.tensor_target import tensor_target

    target = tensor_target("--matrices", name)
    if target is None or target.path is None:
        return None
    if presentation.target.path and presentation.target.path.resolve() == target.path.resolve():
        raise InputError(f"--matrices '{name}' and --output name the same file")
    return target
