"""`duat inspect`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.loading.inputs.request import EVERY

if TYPE_CHECKING:
    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.inspect.save.asked import Saved
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.progress import Progress
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.api.target import FileTarget
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompt_set import PromptSet
    from duat_cli.results.inspect import InspectReport

Threshold = Annotated[
    float,
    options.compute_option(
        "--threshold",
        metavar="X",
        help="An entry of W' counts for the density above X times the root mean square entry.",
    ),
]
ConvWidth = Annotated[
    int,
    options.compute_option(
        "--conv-width", metavar="K", min=1, help="Width of the 1-D convolution that the density is compared with."
    ),
]
Spectrum = Annotated[
    bool, options.compute_option("--spectrum", metavar="", help="Also the spectral norm and stable rank of W'.")
]
Terms = Annotated[
    bool, options.compute_option("--terms", metavar="", help="Also every UAT term's share of the last output.")
]
EndToEnd = Annotated[
    bool,
    options.compute_option(
        "--end-to-end",
        metavar="",
        help="Also how tokens of the first block's input reach the last output through all blocks; beside "
        "uniform attention; as much work as two more passes a token.",
    ),
]
RoutingOption = Annotated[
    bool,
    options.compute_option(
        "--routing",
        metavar="",
        help="Also where attention weights come from: W_QK of every head, and what scores are explained by.",
    ),
]
HeadsOption = Annotated[
    bool,
    options.compute_option(
        "--heads",
        metavar="",
        help="Also what each attention head reads: the first, the previous, an equal or the token behind an equal one "
        "(induction), how many tokens and how far away; beside uniform attention.",
    ),
]
PerPrompt = Annotated[
    bool, options.compute_option("--per-prompt", metavar="", help="Also the values and spreads over the prompts.")
]
Matrices = Annotated[
    str | None,
    options.compute_option(
        "--matrices",
        metavar="FILE",
        help="Write every block's W' by its factors (H, V, O, scales), C, inputs and tokens to a .safetensors file, "
        "block by block; heads x N x N x 4 bytes a block and prompt of N tokens. To rebuild W': "
        "duat explain operator-file.",
    ),
]
MapsOption = Annotated[
    int | None,
    options.compute_option(
        "--maps",
        metavar="K",
        min=0,
        help="Also C of the first K prompts, token by token, up to 64 tokens. Default: 0, with --format html 1.",
    ),
]
Save = Annotated[
    str | None,
    options.compute_option(
        "--save",
        metavar="WHAT",
        help="Write what the input sets in every block, one .safetensors file a prompt, block by block: H (attention "
        "weights), S (norm scales), bias (b'_{j,2} and b'_{j,3}), separated by commas; needs --save-to. More: "
        "duat explain network.",
    ),
]
SaveTo = Annotated[
    str | None,
    options.compute_option(
        "--save-to", metavar="DIR", help="The folder of --save: a new one, or one without such files."
    ),
]
Null = Annotated[
    Literal["all", "uniform"],
    options.compute_option(
        "--null",
        metavar="WHICH",
        help="What to compare the statistics of W' with: uniform attention, or all: also the same architecture "
        "re-initialised, which takes a second model's memory, or a second block's where weights are read in parts.",
    ),
]
NoCache = Annotated[
    bool,
    options.compute_option(
        "--no-cache", metavar="", help="Neither read nor write the cache of Gram matrices and nulls."
    ),
]


def inspect(
    model: options.Model = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    image: options.Images = None,
    audio: options.Sounds = None,
    tensors: options.InputTensors = None,
    stack: options.Stacks = None,
    decoder_prompt: options.DecoderPrompts = None,
    layers: options.Layers = None,
    threshold: Threshold = 0.01,
    conv_width: ConvWidth = 3,
    spectrum: Spectrum = False,
    terms: Terms = False,
    end_to_end: EndToEnd = False,
    routing: RoutingOption = False,
    heads: HeadsOption = False,
    per_prompt: PerPrompt = False,
    matrices: Matrices = None,
    maps: MapsOption = None,
    save: Save = None,
    save_to: SaveTo = None,
    null: Null = "all",
    out: options.Out = None,
    no_cache: NoCache = False,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.CardFormatOption = None,
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
    from duat_cli.analysis.inspect.save.asked import saved_of
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.settings import at_least, blocks_of
    from duat_cli.api.target import tensor_target
    from duat_cli.cli.shared.many import into_folder, processes
    from duat_cli.cli.shared.presentation import Presentation, announce, talk_of

    limit = options.parse_memory(memory)
    files = matrices is not None or save is not None or (maps or 0) > 1  # made by one process, as the prompts run
    shared = 1 if out is not None or files else processes()
    task = Task("inspect", reinitialised=null == "all", processes=shared)
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, task, device_map)
    given = options.input_files(image, audio, tensors, stack, decoder_prompt)
    texts = PromptRequest(prompt, prompts, max_tokens, given, chat=chat)
    talk = talk_of(quiet, verbose, no_color)
    chosen = blocks_of(layers)
    at_least("--threshold", threshold, 0)
    presentation = Presentation.of_page(output, form, json, no_color, wide=wide)
    if stack == EVERY and presentation.form == "model-card":
        raise InputError("--stack all and --format model-card contradict each other: a section is of one stack")
    matrix_file = tensor_target("--matrices", matrices)
    saved = saved_of(save, save_to)

    def settings() -> InspectOptions:
        from duat_cli.analysis.inspect.options import InspectOptions

        return InspectOptions(
            layers=chosen,
            threshold=threshold,
            conv_width=conv_width,
            spectrum=spectrum,
            terms=terms,
            end_to_end=end_to_end,
            routing=routing,
            heads=heads,
            per_prompt=per_prompt,
            null=null,
            cache=not no_cache,
        )

    if out is not None:
        if matrix_file is not None:
            raise InputError("--out and --matrices contradict each other: matrices are written by one process")
        if maps:
            raise InputError("--out and --maps contradict each other: maps are drawn by one process")
        if saved is not None:
            raise InputError("--out and --save contradict each other: what --save writes is written by one process")
        options.refuse_stack(texts.files)
        found = into_folder(wanted, texts, functools.partial(_into, Path(out), settings, max_tokens), talk)
        if found is None:
            return EXIT_SOUND  # the first rank has the report
        reports = [found]
    else:
        if stack == EVERY and (matrix_file is not None or saved is not None):
            name = "--matrices" if matrix_file is not None else "--save"
            raise InputError(f"--stack all and {name} contradict each other: files are of one stack")
        announce(model, talk)
        mapped = int(presentation.form == "html") if maps is None else maps
        reports = _alone(wanted, texts, settings, matrix_file, mapped, saved, talk)

    from duat_cli.report.tables.inspect import render_inspect
    from duat_cli.results.inspect import InspectStacks

    several = InspectStacks(duat_version=reports[0].duat_version, stacks=reports) if stack == EVERY else None
    presentation.emit_stacks(reports, several, render_inspect, talk)
    return EXIT_SOUND if all(report.certificate.exact for report in reports) else EXIT_FINDINGS


def _into(
    out: Path,
    settings: Callable[[], InspectOptions],
    max_tokens: int | None,
    loaded: LoadedModel,
    prompts: PromptSet,
    ranks: Ranks,
    progress: Progress,
) -> InspectReport | None:
    from duat_cli.analysis.shards.inspect import inspect_into
    from duat_cli.cli.shared.many import settle

    if loaded.paged is None:
        settle()
    return inspect_into(out, loaded, prompts, settings(), max_tokens, ranks, progress)


def _alone(
    wanted: ModelRequest,
    texts: PromptRequest,
    settings: Callable[[], InspectOptions],
    matrix_file: FileTarget | None,
    mapped: int,
    saved: Saved | None,
    talk: Talk,
) -> list[InspectReport]:
    from duat_cli.analysis.opening import open_stacks
    from duat_cli.api.target import operator_file
    from duat_cli.cli.shared.token_texts import token_texts
    from duat_cli.cli.terminal.progress import Progress

    reports, count = [], 0
    with Progress(talk) as progress:
        for loaded, inputs in open_stacks(wanted, texts, progress):
            from duat_cli.analysis.inspect.maps import Maps
            from duat_cli.analysis.inspect.run import inspect as compute

            count += len(inputs)
            decode = token_texts(loaded, wanted.trust_remote_code) if mapped or saved or matrix_file else None
            maps = Maps(inputs[:mapped], decode) if mapped and decode else None
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(operator_file(matrix_file, decode))
                states = None
                if saved is not None and decode is not None:
                    from duat_cli.analysis.inspect.save.states import saving

                    kinds, folder = saved
                    states = stack.enter_context(saving(folder, kinds, decode))
                reports.append(compute(loaded, inputs, settings(), progress, file, maps=maps, states=states))
    if matrix_file is not None:
        talk.note(f"wrote {matrix_file.path}")
    if saved is not None:
        from duat_cli.text import plural

        talk.note(f"wrote {plural(count, 'file')} to {saved[1]}")
    return reports
