"""Functions that compare inputs through one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.progress import Progress
from duat_cli.api.asking import Asked, File, Loading, Model, Pictures, Tensors, Texts, computing, input_files
from duat_cli.api.ground import heard
from duat_cli.api.results import CompareResult
from duat_cli.api.settings import beside_shared, blocks_of, one_stack, texts_only
from duat_cli.kinds import Patched
from duat_cli.loading.inputs.request import StackName


@computing
def compare(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    shared: str | None = None,
    prefixes: Sequence[str] | None = None,
    answer: str | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: StackName | None = None,
    decoder_prompt: str | None = None,
    layers: int | str | Iterable[int] | None = None,
    align: Literal["text", "position"] = "text",
    patch: Patched | None = None,
    target: str | None = None,
    against: str | None = None,
    target_field: str | None = None,
    against_field: str | None = None,
    per_prompt: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> CompareResult:
    """`duat compare`: which parameters follow the input. Also for a model in memory.

    prompts: two or more, the first compared with each of the others; or a `shared` text behind each of `prefixes`, and
    an `answer` to it. image, audio, inputs, stack: as in `inspect`; two or more pictures or sounds
    in place of prompts. align: 'text' compares tokens that both prompts have, 'position' those at the same place.
    patch: what of the second prompt is put into the pass of the first, one part at a time. target, against: the tokens
    or classes whose logits it follows; target_field, against_field: fields of `prompts_file` in which every pair has
    its own. `compare_fixed` is `duat compare --fixed`.
    """
    from duat_cli.analysis.compare.answers import Asked as Answers
    from duat_cli.analysis.compare.request import reads_words, texts_of
    from duat_cli.analysis.compare.run import CompareOptions
    from duat_cli.analysis.compare.run import compare as compute
    from duat_cli.loading.words import Words

    files = replace(input_files(image, audio, inputs, one_stack(stack), decoder_prompt), pair=True)
    given = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading, files, chat=chat)
    beside_shared(max_tokens, align, shared, patch, stack)
    texts_only(shared=shared, answer=answer, target=target, against=against)
    texts_only(target_field=target_field, against_field=against_field)
    blocks, own = blocks_of(layers), given.texts
    texts = texts_of(own.prompts, own.file, shared, prefixes, answer, chat=chat, files=files)
    answers = Answers(target, against, target_field, against_field).of(texts, own.file, patched=patch is not None)
    read = texts.question if files.option else texts.texts
    written = [text.ids or text.text for text in read] or None
    asked = replace(given, prompts=written, file=None, made_up=texts.made_up)
    opened = asked.open(Task("compare", patch=patch is not None), heard(progress), read)
    options = CompareOptions(blocks, per_prompt, cache, by_place=align == "position", patch=patch, answers=answers)
    words = Words(opened.tokenizer if reads_words(opened.prompts) else None)
    report = compute(opened.loaded, texts, opened.prompts, options, words, heard(progress))
    return CompareResult.of(report)


@computing
def compare_fixed(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> CompareResult:
    """`duat compare --fixed`: the loss with attention and norm scales held at other values. Also for a model in
    memory."""
    from duat_cli.analysis.compare.fixed import fixed

    asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading, chat=chat)
    opened = asked.open(Task("compare", fixed=True), heard(progress))
    report = fixed(opened.loaded, opened.prompts, asked.texts.own, heard(progress))
    return CompareResult.of(report)
