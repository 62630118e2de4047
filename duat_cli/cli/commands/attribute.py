"""`duat attribute`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.text import clean

if TYPE_CHECKING:
    from duat_cli.analysis.attribute.run import AttributeOptions
    from duat_cli.analysis.attribute.targets import Words
    from duat_cli.analysis.progress import Progress as Heard
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompt_set import PromptSet
    from duat_cli.results.attribute import AttributeReport

Images = Annotated[
    list[str] | None,
    options.input_option(
        "--image",
        metavar="FILE",
        help="A picture within the text, for a model that reads both, not for one of pictures alone; repeatable; needs "
        "Pillow, the extra vision.",
    ),
]
Target = Annotated[
    str | None,
    options.compute_option(
        "--target",
        metavar="TEXT",
        help="The token whose logit is taken apart, with its leading space if it has one, or its id, #5; of a "
        "classifier, the class; of a model without a head, a component of the mean of its last hidden states, or norm. "
        "Without it: the model's own first choice.",
    ),
]
Against = Annotated[
    str | None,
    options.compute_option(
        "--against", metavar="TEXT", help="Another token or class, whose logit is subtracted; mean: the mean over all."
    ),
]
Position = Annotated[
    str | None,
    options.compute_option(
        "--position",
        metavar="N",
        help="The token whose output it is, from 0, or from the end: -1 is the last. all: every token, for the token "
        "that follows it unless --target says another. Without it: the first mask token of the prompt, or the last "
        "token.",
    ),
]
FirstToken = Annotated[
    bool,
    options.compute_option(
        "--first-token", metavar="", help="Take the first token of a --target or --against that is several."
    ),
]
Top = Annotated[
    int,
    options.compute_option("--top", metavar="N", min=1, help="How many leading blocks, heads and neurons are shown."),
]

Steps = Annotated[
    int,
    options.compute_option(
        "--steps", metavar="N", min=0, help="Attribute each of the next N tokens, the model's own first choices."
    ),
]
Continuation = Annotated[
    str | None,
    options.compute_option(
        "--continuation",
        metavar="TEXT",
        help="Attribute the log-probability, linearised, of these tokens behind the prompt.",
    ),
]
TargetField = Annotated[
    str | None,
    options.compute_option(
        "--target-field",
        metavar="NAME",
        help="The target of each prompt is what its line of a .jsonl file has under this name.",
    ),
]
Measure = Annotated[
    int,
    options.compute_option(
        "--measure",
        metavar="K",
        min=0,
        help="Take the K leading heads, neurons and tokens out for real, one at a time, and show what that does beside "
        "their parts.",
    ),
]


def attribute(
    model: options.Model = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    image: Images = None,
    audio: options.Sounds = None,
    tensors: options.InputTensors = None,
    stack: options.Stack = None,
    decoder_prompt: options.DecoderPrompt = None,
    target: Target = None,
    against: Against = None,
    position: Position = None,
    first_token: FirstToken = False,
    top: Top = 10,
    target_field: TargetField = None,
    steps: Steps = 0,
    continuation: Continuation = None,
    measure: Measure = 0,
    out: options.Out = None,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.PageFormatOption = None,
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
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.settings import one_question
    from duat_cli.cli.shared.many import into_folder, processes
    from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
    from duat_cli.cli.terminal.progress import Progress

    limit, place = options.parse_memory(memory), _position(position)
    one_question(target, against, place, steps, continuation, target_field)
    options.require_hub(model, token)
    shared = 1 if out is not None else processes()
    task = Task("attribute", every_position=place == "all", steps=steps, top=top, processes=shared)
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, task, device_map)
    if target_field is not None and (target is not None or prompt or prompts is None):
        raise InputError(
            "--target-field: the targets stand in a file; give --prompts FILE, no --prompt and no --target"
        )
    files = options.input_files(image, audio, tensors, stack, decoder_prompt)
    if stack not in (None, "text", "decoder"):
        raise InputError(f"--stack {stack}: duat attribute reads text, with pictures or without, and a decoder")
    texts = PromptRequest(prompt, prompts, max_tokens, files if stack or files.option else None, chat=chat)
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of_page(output, form, json, no_color)

    def settings(loaded: LoadedModel) -> tuple[Words, AttributeOptions]:
        from duat_cli.analysis.attribute.run import AttributeOptions
        from duat_cli.analysis.attribute.targets import Asked, FieldTargets, Words
        from duat_cli.loading.model.load import load_tokenizer
        from duat_cli.loading.texts import field_of
        from duat_cli.models.discovery.modality import require_token_ids

        require_token_ids(loaded.model)
        each = None
        if target_field is not None and prompts is not None:
            each = FieldTargets(target_field, field_of(prompts, target_field))
        words = Words(load_tokenizer(loaded.files.path, trust_remote_code=trust_remote_code))
        return words, AttributeOptions(
            Asked(target, against, place, first_token), top, steps, continuation, each, measure
        )

    def into(loaded: LoadedModel, read: PromptSet, ranks: Ranks, progress: Heard) -> AttributeReport | None:
        from duat_cli.analysis.shards.attribute import attribute_into

        return attribute_into(Path(out or ""), loaded, read, *settings(loaded), max_tokens, ranks, progress)

    if not texts.own and files.option is None:
        talk.note("no --prompt given: using the bundled prompts")
    if out is not None:
        options.refuse_stack(texts.files)
        found = into_folder(wanted, texts, into, talk)
        if found is None:
            return EXIT_SOUND  # the first rank has the report
        report = found
    else:
        announce(model, talk)
        with Progress(talk) as progress:
            loaded, read = open_session(wanted, texts, progress)
            from duat_cli.analysis.attribute.run import attribute as compute

            report = compute(loaded, read, *settings(loaded), progress)

    from duat_cli.report.tables.attribute.report import render_attribute

    presentation.emit(report, render_attribute, talk)
    return EXIT_SOUND if report.certificate.exact else EXIT_FINDINGS


def _position(text: str | None) -> int | Literal["all"] | None:
    if text is None or text == "all":
        return "all" if text else None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise InputError(f"--position '{clean(text)}': expected a whole number, such as -1, or all")
    return int(text)
