"""`duat attribute`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.text import clean

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TEXT",
        rich_help_panel=options.PANEL_COMPUTE,
        help="The token whose logit is taken apart, with its leading space if it has one; of a classifier, the class; "
        "of a model without a head, a component of the mean of its last hidden states, or norm. Without it: the "
        "model's own first choice.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="TEXT",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Another token or class, whose logit is subtracted; mean: the mean over all.",
    ),
]
Position = Annotated[
    str,
    typer.Option(
        "--position",
        metavar="N",
        rich_help_panel=options.PANEL_COMPUTE,
        help="The token whose output it is, from 0, or from the end: -1 is the last. all: every token, for the token "
        "that follows it unless --target says another.",
    ),
]
FirstToken = Annotated[
    bool,
    typer.Option(
        "--first-token",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Take the first token of a --target or --against that is several.",
    ),
]
Top = Annotated[
    int,
    typer.Option(
        "--top",
        metavar="N",
        min=1,
        rich_help_panel=options.PANEL_COMPUTE,
        help="How many leading blocks, heads and neurons are shown.",
    ),
]

Measure = Annotated[
    int,
    typer.Option(
        "--measure",
        metavar="K",
        min=0,
        rich_help_panel=options.PANEL_COMPUTE,
        help="Take the K leading heads, neurons and tokens out for real, one at a time, and show what that does beside "
        "their parts.",
    ),
]


def attribute(
    model: options.Model = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    target: Target = None,
    against: Against = None,
    position: Position = "-1",
    first_token: FirstToken = False,
    top: Top = 10,
    measure: Measure = 0,
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
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """What a prediction is made of: tokens, blocks, heads and neurons, in exact parts that add up to the logit.

    Exit code: 0 the parts add up to the model's own logit, 1 they miss it, 2 could not tell.
    """
    from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_session
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.terminal.progress import Progress

    limit, place = options.parse_memory(memory), _position(position)
    if target is not None and not target:
        raise InputError("--target: an empty text is no token")
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, in_parts=True)
    texts = PromptRequest(prompt, prompts, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of(output, form, json, no_color)
    if not texts.own:
        talk.note("no --prompt given: using the bundled prompts")

    announce(model, talk)
    with Progress(talk) as progress:
        loaded, read = open_session(wanted, texts, progress)
        from duat_cli.analysis.attribute.run import AttributeOptions
        from duat_cli.analysis.attribute.run import attribute as compute
        from duat_cli.analysis.attribute.targets import Asked, Words
        from duat_cli.loading.model.load import load_tokenizer

        words = Words(load_tokenizer(loaded.files.path, trust_remote_code=trust_remote_code))
        asked = Asked(target, against, place, first_token)
        report = compute(loaded, read, words, AttributeOptions(asked, top, measure), progress)

    from duat_cli.report.tables.attribute import render_attribute

    presentation.emit(report, render_attribute, talk)
    return EXIT_SOUND if report.certificate.exact else EXIT_FINDINGS


def _position(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise InputError(f"--position '{clean(text)}': expected a whole number, such as -1, or all")
    return int(text)
