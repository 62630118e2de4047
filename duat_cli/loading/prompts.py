"""Prompts: where they come from, and as token ids that the model can take.

Every prompt runs on its own: in a batch, padding moves the numbers (0.07 of a logit in bfloat16).
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from duat_cli.errors import InputError
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.text import clean

if TYPE_CHECKING:  # texts are read before torch is imported
    from torch import Tensor
    from transformers import PreTrainedModel

DEFAULT_SET = "prompts/default.jsonl"
HOLDOUT_SET = "prompts/holdout.jsonl"
JSON_LINES = ".jsonl"
SPLIT_SEED = 37
_MAX_BYTES = 64 << 20
_MAX_CHARACTERS = 4 << 20  # of one prompt; beyond, only making tokens of it takes long
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PromptText:
    """A text to run."""

    text: str
    where: str
    """For messages: 'prompts.txt line 3', '--prompt 1'."""
    line: int
    """In its file, from 1; the number of the option for --prompt."""


@dataclass(frozen=True)
class Prompt:
    """A text as the model reads it."""

    text: str
    sha256: str
    """Of the UTF-8 text."""
    input_ids: Tensor  # (1, N), int64
    line: int


@dataclass(frozen=True)
class Limits:
    """What a model can read."""

    vocab_size: int
    """Rows of the input embedding."""
    max_positions: int | None
    """Longest prompt, tokens; None where positions are not limited."""


# --- reading ----------------------------------------------------------------------------------------


def read_prompts(prompt: Sequence[str], prompts_file: str | None, stdin: IO[Any] | None) -> list[PromptText]:
    """The texts of --prompt and of --prompts, in this order; without either the bundled set.

    A file whose name ends in .jsonl holds JSON lines; every other file holds one text a line, whatever the line begins
    with. '-' is standard input: one text for --prompt, one text a line for --prompts. InputError names file and line.
    """
    if [*prompt, prompts_file].count("-") > 1:
        raise InputError("standard input can be read once: give '-' to one of --prompt and --prompts")
    texts = [_option(text, number, stdin) for number, text in enumerate(prompt, 1)]
    if prompts_file is not None:
        texts += _read_file(prompts_file, stdin)
    return texts or default_prompts()


def default_prompts() -> list[PromptText]:
    """The bundled set: several languages, code, data, dialogue, and the paper's own two prompts."""
    return _bundled(DEFAULT_SET)


def holdout_prompts() -> list[PromptText]:
    """A second bundled set of the same mixture, for what must not be tested on the first."""
    return _bundled(HOLDOUT_SET)


def set_apart(texts: Sequence[PromptText], share: float) -> tuple[list[PromptText], list[PromptText]]:
    """The texts in two: the second, a random `share` of them, is held out. The same in every run."""
    count = min(max(round(share * len(texts)), 1), len(texts) - 1)
    if count < 1:
        raise InputError(f"--holdout {share:g}: nothing is left to hold out of {len(texts)} prompt; give more prompts")
    apart = set(random.Random(SPLIT_SEED).sample(range(len(texts)), count))
    kept = [text for k, text in enumerate(texts) if k not in apart]
    return kept, [text for k, text in enumerate(texts) if k in apart]


def _bundled(name: str) -> list[PromptText]:
    raw = (importlib.resources.files("duat_cli.configs") / name).read_bytes()
    return list(_lines(raw, name, json_lines=True))


def _option(text: str, number: int, stdin: IO[Any] | None) -> PromptText:
    where = f"--prompt {number}"
    if text == "-":
        where = "standard input"
        text = _decode(_read_stdin(stdin), where, 1).rstrip("\r\n")
    return _checked(text, where, number)


def _read_file(name: str, stdin: IO[Any] | None) -> list[PromptText]:
    shown = "standard input" if name == "-" else clean(name)
    if name.lower().endswith((".json", ".ndjson")):  # its lines would run as texts, braces and all
        raise InputError(f"{shown}: JSON lines are read from a name that ends in {JSON_LINES}; rename it")
    raw = _read_stdin(stdin) if name == "-" else _read_path(name, shown)
    if len(raw) > _MAX_BYTES:
        raise InputError(f"{shown}: more than {_MAX_BYTES} bytes; expected one prompt a line")
    if not raw:
        raise InputError(f"{shown}: empty, no prompts; expected one a line")
    texts = list(_lines(raw, shown, json_lines=name.lower().endswith(JSON_LINES)))
    if not texts:
        raise InputError(f"{shown}: only blank lines, no prompts; expected one a line")
    return texts


def _read_path(name: str, shown: str) -> bytes:
    try:
        path = Path(name).expanduser()
        # opening a named pipe waits for a writer; a shell's <(command) is one that has it
        if path.is_fifo() and not name.startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin")):
            raise InputError(f"--prompts {shown}: is a named pipe, no regular file; use --prompts - and pipe into duat")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = clean(getattr(error, "strerror", None) or str(error))
        raise InputError(f"--prompts {shown}: cannot be read: {reason}") from error


def _read_stdin(stdin: IO[Any] | None) -> bytes:
    try:
        if stdin is None:
            raise ValueError("it is closed")
        raw: bytes | str = getattr(stdin, "buffer", stdin).read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"standard input: cannot be read: {clean(str(error))}") from error
    return raw.encode("utf-8", "surrogateescape") if isinstance(raw, str) else raw


def _lines(raw: bytes, name: str, json_lines: bool) -> Iterator[PromptText]:
    """One prompt a line, blank lines aside; with `json_lines` each line is an object with a "text"."""
    for number, line in enumerate(raw.removeprefix(_BOM).split(b"\n"), 1):
        where = f"{name} line {number}"
        text = _decode(line.removesuffix(b"\r"), where, 0)
        if not text.strip():
            continue
        if json_lines:
            text = _text_field(text, where)
        yield _checked(text, where, number)


def _decode(raw: bytes, where: str, line: int) -> str:
    """line: of the first byte, for a text of several lines; 0 where `where` names the line."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f" line {line + raw[: error.start].count(10)}" if line else ""
        byte = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise InputError(f"{where}{place}: not UTF-8 ({byte}); save it as UTF-8") from error


def _text_field(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f'{where}: not JSON: {clean(str(error))}; expected {{"text": ...}}') from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{where}: expected an object with a "text" that is a string')
    return text


def _checked(text: str, where: str, line: int) -> PromptText:
    if len(text) > _MAX_CHARACTERS:
        raise InputError(f"{where}: too long, {len(text)} characters; expected at most {_MAX_CHARACTERS}")
    if not text.strip():
        raise InputError(f"{where}: empty prompt; expected a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half a surrogate pair, from JSON or from a raw argument
        raise InputError(f"{where}: character {error.start + 1} has no UTF-8 form; expected UTF-8") from error
    return PromptText(text, where, line)


# --- token ids --------------------------------------------------------------------------------------


def encode(
    tokenizer: Any,
    prompts: Sequence[PromptText],
    max_tokens: int | None,
    max_positions: int | None,
    vocab_size: int,
) -> list[Prompt]:
    """Each prompt as token ids (1, N), unbatched, special tokens included; InputError names the prompt.

    max_tokens cuts, as the user asked for it; max_positions refuses, since a model past its positions
    extrapolates without a word.
    """
    return [_encode(tokenizer, p, max_tokens, max_positions, vocab_size) for p in prompts]


def _encode(
    tokenizer: Any, prompt: PromptText, max_tokens: int | None, max_positions: int | None, vocab_size: int
) -> Prompt:
    import torch

    ids = _token_ids(tokenizer, prompt, max_tokens)
    if not ids:
        raise InputError(f"{prompt.where}: the tokenizer makes no tokens of it; expected one at least")
    if max_positions is not None and len(ids) > max_positions:
        raise InputError(
            f"{prompt.where}: too long, {len(ids)} tokens, the model has {max_positions} positions; "
            f"shorten it, or use --max-tokens {max_positions}"
        )
    foreign = next((i for i in ids if not 0 <= i < vocab_size), None)
    if foreign is not None:
        raise InputError(
            f"{prompt.where}: token id {foreign} is out of the vocabulary, vocab_size {vocab_size}: "
            "the tokenizer belongs to another model"
        )
    sha256 = hashlib.sha256(prompt.text.encode("utf-8")).hexdigest()
    return Prompt(prompt.text, sha256, torch.tensor([ids], dtype=torch.long), prompt.line)


def _token_ids(tokenizer: Any, prompt: PromptText, max_tokens: int | None) -> list[int]:
    cut = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
    with calling_tokenizer(f"{prompt.where}: the tokenizer fails", InputError):
        ids = tokenizer(prompt.text, verbose=False, **cut)["input_ids"]
        return [int(i) for i in ids][:max_tokens]  # below the number of special tokens it does not truncate


def limits(model: PreTrainedModel) -> Limits:
    """The model's vocabulary and its longest prompt."""
    try:
        rows = model.get_input_embeddings().weight.shape[0]
    except (NotImplementedError, AttributeError):  # some text towers keep their table elsewhere
        rows = model.config.get_text_config().vocab_size
    return Limits(rows, _max_positions(model))


def _max_positions(model: PreTrainedModel) -> int | None:
    """`max_position_embeddings`, less the rows that no token can have.

    roberta and its kin count positions from padding_idx + 1, so 514 rows hold 512 tokens.
    """
    from torch import nn

    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(stated, int) or stated <= 0:
        return None
    for name, module in model.named_modules():
        tabled = isinstance(module, nn.Embedding) and module.num_embeddings == stated and "position" in name
        if tabled and module.padding_idx is not None:
            return stated - module.padding_idx - 1
    return stated
