"""`duat compare`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.kinds import Patched


class Asked(Options):
    """What is compared."""

    prompt: list[str] | None = options.input_option(
        metavar="TEXT",
        help="A text to run; give two or more: the first is compared with each of the others; - reads standard input. "
        "Default: the paper's two.",
    )
    prompts: str | None = options.input_option(
        metavar="FILE",
        help='Many pairs: JSON lines {"a": ..., "b": ...} in a .jsonl file, or compressed in .jsonl.gz; - reads '
        "standard input.",
    )
    shared: str | None = options.input_option(
        metavar="TEXT", help="One text behind several contexts (--prefix); only its tokens are compared."
    )
    prefix: list[str] | None = options.input_option(
        metavar="TEXT",
        help="A context in front of --shared, on a line of its own; repeatable. If there is one, it is compared with "
        "the text alone; of several, each is compared with the first.",
    )
    answer: str | None = options.input_option(
        metavar="TEXT",
        help="The answer to --shared, which is then a question, with every --prefix as a demonstration. Its loss is "
        "taken with none, each and all of them.",
    )
    max_tokens: int | None = options.Texts.max_tokens
    chat: bool = options.Texts.chat
    layers: str | None = options.LAYERS
    align: Literal["text", "position"] = options.compute_option(
        "text",
        metavar="HOW",
        help="Which tokens are compared: those that both prompts have (text), or each with the one at its place "
        "(position), for prompts with the same number of tokens that differ in a word. Pictures and sounds are "
        "always compared by position.",
    )
    fixed: bool = options.compute_option(
        help="Instead, show what dynamic parameters gain: the loss with attention weights, then norm scales, then "
        "router weights too, held at the prompt's own values, another prompt's, and the mean. For prompts of equal "
        "length, or the bundled set."
    )
    patch: Patched | None = options.compute_option(
        metavar="WHAT",
        help="Also show what moves the prediction: parts of the second prompt are put into the pass of the first, one "
        "at a time, block by block: attention weights, norm scales and FFN (blocks), each head's weights (heads), or "
        "each token's stream (tokens). For two prompts with the same number of tokens.",
    )
    target: str | None = options.compute_option(
        metavar="TEXT",
        help="With --patch and --against: the token, or class, whose logit is followed, as for duat attribute. "
        "Default of both: the one whose probability rises most from the first prompt to the second.",
    )
    against: str | None = options.compute_option(
        metavar="TEXT",
        help="With --target: the token whose logit is subtracted. Default of both: the one whose probability falls "
        "most.",
    )
    target_field: str | None = options.compute_option(
        metavar="NAME", help="Take --target of each pair from its line of --prompts, under this name."
    )
    against_field: str | None = options.compute_option(
        metavar="NAME", help="Take --against of each pair from its line, under this name."
    )
    per_prompt: bool = options.compute_option(help="Also show the values of each pair.")
    no_cache: bool = options.compute_option(help="Neither read nor write the cache of Gram matrices.")


@grouped
def compare(
    model: str | None = options.MODEL,
    *,
    asked: Asked,
    files: options.OneStack,
    loading: options.Loading,
    shown: options.Page,
    wide: bool = options.WIDE,
    voice: options.Voice,
) -> int:
    """Which parameters follow the input: two prompts through one model, W', biases and terms of every block compared.

    It also compares two pictures or sounds, if the model reads them; for pictures within a text, --prompt is the text
    of each. To compare two checkpoints, use duat lora-diff.

    Exit code: 0 exact, 1 the certificate is not exact, 2 could not tell.
    """
    from duat_cli.analysis.compare.answers import Asked as Answers
    from duat_cli.analysis.compare.request import reads_words, texts_of
    from duat_cli.analysis.opening import PromptRequest, open_session, open_texts
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.settings import beside_shared, blocks_of

    wanted = loading.request(model, Task("compare", fixed=asked.fixed, patch=asked.patch is not None))
    talk, given = talk_of(voice), replace(files.given(), pair=True)
    chosen = blocks_of(asked.layers)
    presentation = Presentation.of(shown, voice, wide=wide)
    prompt, prompts, shared, prefix, answer = asked.prompt, asked.prompts, asked.shared, asked.prefix, asked.answer
    beside_shared(asked.max_tokens, asked.align, shared, asked.patch, files.stack)
    together = shared is not None or prefix or answer is not None
    followed = Answers(asked.target, asked.against, asked.target_field, asked.against_field)
    compared = chosen is not None or asked.per_prompt or asked.align != "text" or asked.patch or followed != Answers()
    compared = compared or given.option is not None or given.stack is not None
    if asked.fixed and (together or compared):
        raise InputError("--fixed: takes --prompt or --prompts, and no option of a comparison")
    texts = None if asked.fixed else texts_of(prompt, prompts, shared, prefix, answer, chat=asked.chat, files=given)
    answers = None if texts is None else followed.of(texts, prompts, patched=asked.patch is not None)

    announce(model, talk)
    with Progress(talk) as progress:
        if texts is None:
            own = PromptRequest(prompt, prompts, asked.max_tokens, chat=asked.chat)
            loaded, encoded = open_session(wanted, own, progress)
            from duat_cli.analysis.compare.fixed import fixed

            report = fixed(loaded, encoded, own.own, progress)
        else:
            ran = texts.texts if given.option is None else texts.question
            read = PromptRequest([text.text for text in ran], None, asked.max_tokens, given, texts.made_up)
            reading = open_texts(wanted, read, ran, progress)
            from duat_cli.analysis.compare.run import CompareOptions
            from duat_cli.analysis.compare.run import compare as compute
            from duat_cli.loading.words import Words

            settings = CompareOptions(
                layers=chosen,
                per_prompt=asked.per_prompt,
                cache=not asked.no_cache,
                by_place=asked.align == "position",
                patch=asked.patch,
                answers=answers,
            )
            code, said = loading.trust_remote_code, reads_words(reading.inputs)
            words = Words(reading.own_tokenizer(trust_remote_code=code) if said else None)
            report = compute(reading.loaded, texts, reading.inputs, settings, words, progress)

    if texts is not None and texts.made_up and said:  # of a drawn picture the report has a warning
        alike = files.stack != "decoder" and (asked.patch is not None or asked.align == "position")
        cut = ", cut to as many tokens" if alike else ""
        talk.note(f"no prompts given: using the paper's own two{cut}")
    presentation.emit(report, talk)
    checks = [found.holds for found in (report.fixed, report.patched) if found is not None]
    sound = report.certificate.exact and all(checks)
    return EXIT_SOUND if sound else EXIT_FINDINGS
