"""`duat attribute`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.many import as_rank, processes
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.text import clean, expanded

if TYPE_CHECKING:
    from duat_cli.analysis.attribute.run import AttributeOptions
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.words import Words
    from duat_cli.results.attribute import AttributeReport


class Files(options.OneStack):
    """With a picture within a text."""

    image: list[str] | None = options.input_option(
        metavar="FILE",
        help="A picture within the text, for a model that reads both, not for one that reads only pictures; "
        "repeatable; needs Pillow, the extra vision.",
    )


class Asked(Options):
    """What is attributed."""

    target: str | None = options.compute_option(
        metavar="TEXT",
        help="The token whose logit is taken apart, with its leading space if it has one, or its id, such as #5. For "
        "a classifier: the class. For a model without a head: a component of the mean of its last hidden states, or "
        "norm. Default: the model's own first choice.",
    )
    against: str | None = options.compute_option(
        metavar="TEXT", help="Another token or class, whose logit is subtracted; mean: the mean over all."
    )
    position: str | None = options.compute_option(
        metavar="N",
        help="The token whose output is taken apart, counted from 0, or from the end: -1 is the last. all: every "
        "token; unless --target is given, the target is the token that follows (in a masked LM: the one that stands "
        "there). Default: the first mask token of the prompt, or the last token.",
    )
    first_token: bool = options.compute_option(help="If --target or --against is several tokens, take the first.")
    top: int = options.compute_option(
        10, metavar="N", min=1, help="How many leading blocks, heads and neurons are shown."
    )
    target_field: str | None = options.compute_option(
        metavar="NAME", help="Take --target of each prompt from its line of a .jsonl file, under this name."
    )
    against_field: str | None = options.compute_option(
        metavar="NAME", help="Take --against of each prompt from its line, under this name."
    )
    steps: int = options.compute_option(
        0, metavar="N", min=0, help="Attribute each of the next N tokens, the model's own first choices."
    )
    continuation: str | None = options.compute_option(
        metavar="TEXT", help="Attribute the linearised log-probability of these tokens behind the prompt."
    )
    measure: int = options.compute_option(
        0,
        metavar="K",
        min=0,
        help="Really remove the K leading heads, neurons and tokens, one at a time, and show the effect beside their "
        "parts.",
    )
    out: str | None = options.OUT


@grouped
def attribute(
    model: str | None = options.MODEL,
    *,
    texts: options.Texts,
    files: Files,
    asked: Asked,
    loading: options.Loading,
    shown: options.Page,
    voice: options.Voice,
) -> int:
    """What a prediction is made of: tokens, blocks, heads and neurons, in exact parts that add up to the logit.

    Exit code: 0 the parts add up to the model's own logit, 1 they miss it, 2 could not tell.
    """
    from duat_cli.analysis.opening import open_session, open_set
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.settings import one_question
    from duat_cli.loading.texts import field_beside

    wanted, place = loading.request(model), _position(asked.position)
    fields = asked.target_field, asked.against_field
    one_question(asked.target, asked.against, place, asked.steps, asked.continuation, *fields)
    file = None if texts.prompt else texts.prompts
    each = (
        field_beside("--target", asked.target, asked.target_field, file),
        field_beside("--against", asked.against, asked.against_field, file),
    )
    options.require_hub(model, loading.token)
    shared = 1 if asked.out is not None else processes()
    steps = asked.steps or int(asked.continuation is not None)
    task = Task("attribute", every_position=place == "all", steps=steps, top=asked.top, processes=shared)
    wanted = replace(wanted, task=task)
    if asked.first_token and not any((asked.target, asked.against, *fields)):
        raise InputError("--first-token: there is no text whose first token it could take; give --target or --against")
    given = files.given()
    if given.stack not in (None, "text", "decoder"):
        raise InputError(f"--stack {given.stack}: duat attribute reads text, with pictures or without, and a decoder")
    read = texts.request(given if given.stack or given.option else None)
    talk = talk_of(voice)
    presentation = Presentation.of(shown, voice)

    def settings(loaded: LoadedModel) -> tuple[Words, AttributeOptions]:
        from duat_cli.analysis.attribute.run import AttributeOptions
        from duat_cli.analysis.attribute.targets import Asked as Target
        from duat_cli.loading.model.tokenizer import tokenizer_if_any
        from duat_cli.loading.words import Words
        from duat_cli.models.discovery.modality import require_token_ids

        require_token_ids(loaded.model)
        words = Words(tokenizer_if_any(loaded.files.path, trust_remote_code=loading.trust_remote_code))
        target = Target(asked.target, asked.against, place, asked.first_token)
        return words, AttributeOptions(target, asked.top, asked.steps, asked.continuation, each, asked.measure)

    def into(ranks: Ranks, progress: Progress) -> AttributeReport | None:
        from duat_cli.analysis.shards.attribute import attribute_into

        loaded, prompts = open_set(wanted, read, progress, ranks.local)
        return attribute_into(
            expanded(asked.out or ""), loaded, prompts, *settings(loaded), texts.max_tokens, ranks, progress
        )

    if not read.own and given.option is None:
        talk.note("no --prompt given: using the bundled prompts")
    if asked.out is not None:
        options.refuse_stack(read.files)
        report = as_rank(model, read, into, talk)
    else:
        announce(model, talk)
        with Progress(talk) as progress:
            loaded, prompts = open_session(wanted, read, progress)
            from duat_cli.analysis.attribute.run import attribute as compute

            report = compute(loaded, prompts, *settings(loaded), progress)
    if report is None:
        return EXIT_SOUND  # the first rank has it

    presentation.emit(report, talk)
    return EXIT_SOUND if report.certificate.exact else EXIT_FINDINGS


def _position(text: str | None) -> int | Literal["all"] | None:
    if text is None or text == "all":
        return "all" if text else None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise InputError(f"--position '{clean(text)}': expected a whole number, such as -1, or all")
    return int(text)
