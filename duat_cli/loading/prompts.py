"""Prompts: their sources, and their token ids.

No prompt is ever padded, since padding changes the numbers (0.07 of a logit in bfloat16). Prompts that run together
have equal numbers of tokens.
"""

from __future__ import annotations

import importlib.resources
import io
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, TypeVar

from duat_cli.compat.transformers import stated
from duat_cli.errors import InputError
from duat_cli.loading.chat import as_written
from duat_cli.loading.pieces import piece_text
from duat_cli.loading.quiet import calling_tokenizer, foreign_errors, silenced
from duat_cli.loading.texts import (
    BOM,
    MAX_BYTES,
    PromptText,
    all_asked,
    asked,
    checked,
    decode,
    lines,
    numbered,
    read_stdin,
    texts_of,
)
from duat_cli.text import clean, expanded

if TYPE_CHECKING:  # texts are read before torch is imported
    from torch import Tensor
    from transformers import PreTrainedModel

T = TypeVar("T")
Spans = tuple[tuple[int, int], ...]

DEFAULT_SET = "prompts/default.jsonl"
HOLDOUT_SET = "prompts/holdout.jsonl"
SPLIT_SEED = 37
DYNAMIC = " before its dynamic rotary frequencies begin to depend on the longest text that ran before"


@dataclass(frozen=True)
class Prompt:
    """A text as the model reads it."""

    text: str
    sha256: str
    """Hash of the UTF-8 text; for a conversation, of its messages."""
    input_ids: Tensor  # (1, N), int64
    line: int
    spans: Spans | None = None
    """For each token, the span of the text that it stands for, from and to (0 and 0 for a special token); None where
    the tokenizer does not return spans."""
    prepared: Mapping[str, Tensor] | None = None
    """The input of a model that reads no token ids; `input_ids` then counts its positions, from 0."""
    source: Prompt | None = None
    """For a decoder's prompt, the prompt of the encoder whose states it reads; else None."""

    pieces: Mapping[int, str] = field(default_factory=dict)
    """Positions that hold a piece of a picture, a video or a sound in place of a word, in order, each with its kind:
    'image', 'video' or 'audio'."""
    messages: str | None = None
    """The JSON of the conversation that `text` was written from; None for a plain text."""
    answered: tuple[int, ...] | None = ()
    """Positions of the tokens of the model's own messages in a conversation; None where they are unknown."""

    @property
    def of_tokens(self) -> bool:
        """Whether its positions are those of tokens, of a text or of what a decoder reads, and `input_ids` has them."""
        return self.prepared is None or self.source is not None

    @property
    def given(self) -> Tensor | Mapping[str, Tensor]:
        """The input that the model is run on."""
        return self.input_ids if self.prepared is None else self.prepared

    @property
    def read(self) -> tuple[int, ...] | str:
        """A key that is equal for prompts on which a model gives equal results: the tokens, or a hash of the prepared
        input."""
        return tuple(self.input_ids.flatten().tolist()) if self.prepared is None else self.sha256


@dataclass(frozen=True)
class Limits:
    """Limits of the prompts that a model can read."""

    vocab_size: int
    """Rows of the input embedding."""
    max_positions: int | None
    """Longest prompt, tokens; None where positions are not limited."""
    why: str = ""
    """The reason of that limit, where it is not the number of positions."""


# --- reading ----------------------------------------------------------------------------------------


def read_prompts(
    prompt: Sequence[str | PromptText],
    prompts_file: str | None,
    stdin: IO[Any] | None,
    option: str = "--prompts",
    *,
    chat: bool = False,
) -> list[PromptText]:
    """The texts of --prompt and of --prompts, in this order; without either, the bundled set.

    A file whose name ends in .jsonl holds JSON lines, in .parquet a table; every other file holds one text a line,
    whatever the line begins with. With .gz behind it, lines are compressed. '-' is standard input: one text for
    --prompt, one text a line for --prompts. InputError names file and line. option: the option that named the file;
    chat: whether each text is a user's message in a conversation.
    """
    texts = _options(prompt, prompts_file, stdin)
    if prompts_file is not None:
        texts += _held(prompts_file, stdin, option)
    return all_asked(texts or default_prompts(), chat)


def open_prompts(
    prompt: Sequence[str | PromptText], prompts_file: str | None, stdin: IO[Any] | None, *, chat: bool = False
) -> Iterable[PromptText]:
    """The texts of `read_prompts`, from a regular file of any size: each pass reads it anew, and a faulty line raises
    its error only when it is read."""
    if prompts_file is None or not expanded(prompts_file).is_file():
        return read_prompts(prompt, prompts_file, stdin, chat=chat)
    return _Stream(_options(prompt, prompts_file, stdin), prompts_file, chat)


def _options(prompt: Sequence[str | PromptText], prompts_file: str | None, stdin: IO[Any] | None) -> list[PromptText]:
    if [*prompt, prompts_file].count("-") > 1:
        raise InputError("standard input can be read once: give '-' to one of --prompt and --prompts")
    return [
        text if isinstance(text, PromptText) else _option(text, number, stdin) for number, text in enumerate(prompt, 1)
    ]


def default_prompts() -> list[PromptText]:
    """The bundled set: several languages, code, data, dialogue, and the paper's own two prompts."""
    return _bundled(DEFAULT_SET)


def holdout_prompts(*, chat: bool = False) -> list[PromptText]:
    """A second bundled set of the same mixture, for tests that must not use the first."""
    return all_asked(_bundled(HOLDOUT_SET), chat)


def set_apart(texts: Sequence[T], share: float) -> tuple[list[T], list[T]]:
    """The texts, or items that stand for them, in two parts: the second, a random `share` of them, is held out. Every
    run splits alike."""
    count = min(max(round(share * len(texts)), 1), len(texts) - 1)
    if count < 1:
        raise InputError(f"--holdout {share:g}: nothing is left to hold out of {len(texts)} prompt; give more prompts")
    apart = set(random.Random(SPLIT_SEED).sample(range(len(texts)), count))
    kept = [text for k, text in enumerate(texts) if k not in apart]
    return kept, [text for k, text in enumerate(texts) if k in apart]


def share_of(holdout: str | None) -> float | None:
    """The share that --holdout states; None where it is no number and so names a file."""
    try:
        share = float(holdout or "")
    except ValueError:
        return None
    if not 0 < share < 1:
        raise InputError(f"--holdout {holdout}: expected a share between 0 and 1, or a file of prompts")
    return share


def _bundled(name: str) -> list[PromptText]:
    raw = (importlib.resources.files("duat_cli.configs") / name).read_bytes()
    return list(lines(io.BytesIO(raw), name, json_lines=True))


def _option(text: str, number: int, stdin: IO[Any] | None) -> PromptText:
    where = f"--prompt {number}"
    if text == "-":
        where = "standard input"
        text = decode(read_stdin(stdin).removeprefix(BOM), where, 1).rstrip("\r\n")
    return checked(text, where, number)


@dataclass(frozen=True)
class _Stream:
    """Some texts, then those of a file, which every pass reads anew."""

    first: Sequence[PromptText]
    file: str
    chat: bool

    def __iter__(self) -> Iterator[PromptText]:
        for text in itertools.chain(self.first, texts_of(self.file, None)):
            yield asked(text) if self.chat else text


def _held(file: str, stdin: IO[Any] | None, option: str) -> Iterator[PromptText]:
    """The texts of a file, whose total size must fit a list in memory."""
    size = 0
    for text in texts_of(file, stdin, option):
        size += len(text.text.encode())
        if size > MAX_BYTES:
            shown = "standard input" if file == "-" else clean(file)
            raise InputError(f"{shown}: more than {MAX_BYTES} bytes of texts; split it")
        yield text


# --- token ids --------------------------------------------------------------------------------------


def encode(
    tokenizer: Any,
    prompts: Sequence[PromptText],
    max_tokens: int | None,
    max_positions: int | None,
    vocab_size: int,
    why: str = "",
) -> list[Prompt]:
    """Each prompt as token ids (1, N), unbatched, special tokens included; InputError names the prompt. A conversation
    becomes the text that its template writes, which contains the special tokens itself.

    max_tokens cuts, as the user asked for it; max_positions refuses, because a model past its positions extrapolates
    silently. why: as in `Limits`.
    """
    with silenced():
        return [_encode(tokenizer, p, max_tokens, Limits(vocab_size, max_positions, why)) for p in prompts]


def _encode(tokenizer: Any, prompt: PromptText, max_tokens: int | None, room: Limits) -> Prompt:
    import torch

    made = None if tokenizer is None else as_written(tokenizer, prompt)
    text = prompt.text if made is None else made.text
    ids, spans = _token_ids(tokenizer, replace(prompt, text=text), max_tokens)
    if not ids:
        raise InputError(f"{prompt.where}: the tokenizer makes no tokens of it; expected one at least")
    if room.max_positions is not None and len(ids) > room.max_positions:
        raise InputError(
            f"{prompt.where}: too long, {len(ids)} tokens, the model has {room.max_positions} positions{room.why}; "
            f"shorten it, or use --max-tokens {room.max_positions}"
        )
    foreign = next((i for i in ids if not 0 <= i < room.vocab_size), None)
    if foreign is not None:
        raise InputError(
            f"{prompt.where}: token id {foreign} is out of the vocabulary, vocab_size {room.vocab_size}: "
            + ("give others" if prompt.ids is not None else "the tokenizer belongs to another model")
        )
    messages = prompt.text if prompt.conversation else None
    places = _places([] if made is None else made.answered(), spans)
    tokens = torch.tensor([ids], dtype=torch.long)
    return Prompt(text, prompt.sha256, tokens, prompt.line, spans, messages=messages, answered=places)


def _places(found: Sequence[tuple[int, int]] | None, spans: Spans | None) -> tuple[int, ...] | None:
    """Positions of the tokens that stand for any of these characters; None where that is unknown."""
    if found is None or (found and spans is None):
        return None
    inside = (any(start < b and a < end for a, b in found) for start, end in spans or ())
    return tuple(itertools.compress(itertools.count(), inside))


def _token_ids(tokenizer: Any, prompt: PromptText, max_tokens: int | None) -> tuple[list[int], Spans | None]:
    """The prompt's token ids and spans. prompt: a conversation comes as it was written out."""
    if prompt.ids is not None:
        return list(prompt.ids[:max_tokens]), None
    if tokenizer is None:
        raise InputError(f"{prompt.where}: a text, but there is no tokenizer; give the model's own, or token ids")
    cut = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
    spans_asked = {"return_offsets_mapping": True} if getattr(tokenizer, "is_fast", False) else {}
    bare = {"add_special_tokens": False} if prompt.conversation else {}
    with foreign_errors(f"{prompt.where}: the tokenizer fails", InputError):
        found = tokenizer(prompt.text, verbose=False, **cut, **spans_asked, **bare)
        ids, spans = found["input_ids"], found.get("offset_mapping")
        # below the number of special tokens it does not truncate
        return [int(i) for i in ids][:max_tokens], None if spans is None else tuple(map(tuple, spans))[:max_tokens]


def said(tokenizer: Any, tokens: list[int], front: str = "") -> str:
    """The text of consecutive tokens, '#5' without a tokenizer; for a single token, its `piece_text`. front: the
    beginning of the error."""
    if tokenizer is None:
        return numbered(tokens)
    with calling_tokenizer(f"{front}the tokenizer fails", InputError):
        return piece_text(tokenizer, tokens[0]) if len(tokens) == 1 else str(tokenizer.decode(tokens))


def limits(model: PreTrainedModel) -> Limits:
    """The model's vocabulary and its longest prompt."""
    from torch import nn

    try:
        table: Any = model.get_input_embeddings()
        # MusicGen has one for each of its codebooks
        tables: Iterable[Any] = table if isinstance(table, nn.ModuleList) else [table]
        rows = min(one.weight.shape[0] for one in tables)
    except (NotImplementedError, AttributeError):  # some text parts keep their table elsewhere
        rows = stated(model.config, "vocab_size") or sys.maxsize  # such as CANINE, which reads code points
    rope = stated(model.config, "rope_parameters")
    dynamic = isinstance(rope, Mapping) and rope.get("rope_type") == "dynamic"
    return Limits(rows, _max_positions(model), DYNAMIC if dynamic else "")


def _max_positions(model: PreTrainedModel) -> int | None:
    """The longest prompt in tokens: `max_position_embeddings`, less the rows that no token can have.

    roberta and its kin count positions from padding_idx + 1, so 514 rows hold 512 tokens. With linearly scaled rotary
    positions, the config states the number before scaling. Dynamic ones take more than is stated too, but keep the
    frequencies of the longest prompt so far: past the stated number, results would depend on what ran before.
    """
    from torch import nn

    most = stated(model.config, "max_position_embeddings")
    if not isinstance(most, int) or most <= 0:
        return None
    for name, module in model.named_modules():
        tabled = isinstance(module, nn.Embedding) and module.num_embeddings == most and "position" in name
        if tabled and module.padding_idx is not None:
            return most - module.padding_idx - 1
    rope = stated(model.config, "rope_parameters")
    scaled = isinstance(rope, Mapping) and rope.get("rope_type") == "linear"
    return int(most * max(float(rope.get("factor") or 1.0), 1.0)) if scaled else most
