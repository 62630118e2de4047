"""Facts about a tokenizer, apart from the bytes of its files: how it encodes texts, and which ids it can return.

They are asked of the tokenizer that transformers made from the files, because that one runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duat_cli.compat.tokenizers import byte_alphabet
from duat_cli.compat.transformers import named_tokens, template_fault
from duat_cli.errors import CheckpointError
from duat_cli.grouping import by_key
from duat_cli.loading.chat import USER, written
from duat_cli.loading.checkpoint.files import read_json
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.loading.texts import conversation
from duat_cli.text import clean

RANGES = 512
"""Ranges of ids whose tokens are hashed separately, to show where two vocabularies differ."""
DIGITS = 4  # digits of a range's hash; the hash of the whole vocabulary decides whether two are equal
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SETTINGS = ("padding_side", "model_max_length", "clean_up_tokenization_spaces", "split_special_tokens")
CALLS = ("truncation", "padding")  # parts of tokenizer.json that hold for a caller that passes no options
CODE = "auto_map"
LATER = (CODE, "truncation_side", "model_input_names")  # fields that older baselines know nothing of
_OTHER_MODALITIES = ("image", "audio", "video", "vision", "boi", "eoi", "boa", "eoa")
_FILES = ("*.model", "vocab.txt", "vocab.json", "merges.txt", "spiece*", "*.tiktoken")  # without tokenizer.json


@dataclass(frozen=True)
class TokenizerFacts:
    """The facts about a tokenizer that rules and baselines need."""

    vocabulary: dict[int, str]
    """Id -> token, added ones included."""
    parts: dict[str, str]
    """Part, such as 'merges' -> hash of its content; 'none' for a part that is missing."""
    fields: dict[str, str | int | bool]
    """Special tokens by role, and settings."""
    roles: dict[str, int]
    """'bos_token' and its kin -> id."""
    special: frozenset[int]
    """Ids of special tokens."""
    placeholders: frozenset[int]
    """Those of the special ids that stand for images, sound and video; no text is encoded to them."""
    template: str
    """The chat template; empty for none."""
    template_fault: str | None
    """Why the chat template cannot be compiled; None where it can, or there is none."""
    template_fails: str | None
    """Why the compiled chat template cannot write one message of a user; None where it can, or there is none."""
    starts_with_bos: bool
    """Whether the tokenizer puts its bos token in front of a text."""
    lost: tuple[str, ...]
    """Texts that decoding their tokens does not give back; empty for a tokenizer that cannot write every byte."""

    @property
    def size(self) -> int:
        """One above the largest id."""
        return max(self.vocabulary, default=-1) + 1

    def ranges(self, size: int) -> str:
        """Hashes of ranges of consecutive ids with their tokens, joined to one text; `range_length(size)` ids a
        range."""
        step = range_length(size)
        found = by_key((pair[0] // step, pair) for pair in sorted(self.vocabulary.items()))
        return "".join(_hash(found.get(number, []))[:DIGITS] for number in range(-(-size // step)))


def range_length(size: int) -> int:
    """Ids in each of at most `RANGES` ranges of a vocabulary of `size` ids."""
    return max(1, -(-size // RANGES))


def tokenizer_facts(tokenizer: Any, folder: Path, texts: Sequence[str]) -> TokenizerFacts:
    """The facts about a tokenizer of transformers. texts: those that its round trip is tried on. CheckpointError where
    the tokenizer fails."""
    with calling_tokenizer(f"{clean(str(folder))}: the tokenizer fails"):
        return _facts(tokenizer, folder, texts)


def _facts(tokenizer: Any, folder: Path, texts: Sequence[str]) -> TokenizerFacts:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else None
    numbers = tokenizer.get_vocab()
    vocabulary = {int(number): token for token, number in numbers.items()}
    roles = {role: number for role in _ROLES if (number := getattr(tokenizer, f"{role}_id", None)) is not None}
    template = _canonical(getattr(tokenizer, "chat_template", None))
    fault = _template_fault(getattr(tokenizer, "chat_template", None))
    reversible = content is not None and _writes_every_byte(content, numbers)
    bos = roles.get("bos_token")
    return TokenizerFacts(
        vocabulary=vocabulary,
        parts={
            "vocabulary": _hash(sorted(vocabulary.items())),
            **_parts(content, folder),
            "chat template": _digest(template),
        },
        fields={**_fields(tokenizer, roles), **_stated(tokenizer, folder)},
        roles=roles,
        special=frozenset(int(i) for i in tokenizer.all_special_ids),
        placeholders=frozenset(_placeholders(tokenizer, numbers)),
        template=template,
        template_fault=fault,
        template_fails=_template_fails(tokenizer) if template and fault is None else None,
        starts_with_bos=bos is not None and list(tokenizer("a", verbose=False)["input_ids"])[:1] == [bos],
        lost=tuple(text for text in texts if not _comes_back(tokenizer, text)) if reversible else (),
    )  # fmt: skip


def tokens_hash(prompts: Iterable[Sequence[int]]) -> str:
    """Hash of the token ids of all prompts, in order."""
    return _hash([list(map(int, ids)) for ids in prompts])


def texts_hash(texts: Iterable[str], max_tokens: int | None) -> str:
    """Hash of the texts of all prompts, and of the most tokens that each may have."""
    return _hash([max_tokens, *(hashlib.sha256(text.encode()).hexdigest() for text in texts)])


def _fields(tokenizer: Any, roles: Iterable[str]) -> dict[str, str | int | bool]:
    found: dict[str, str | int | bool] = {role: str(getattr(tokenizer, role)) for role in roles}
    for name in _SETTINGS:
        value = getattr(tokenizer, name, None)
        if isinstance(value, str | int):
            found[name] = value
    return found


def _stated(tokenizer: Any, folder: Path) -> dict[str, str]:
    """The fields of LATER: classes of the checkpoint's own code that tokenizer_config.json names, which run where a
    caller trusts them; the end of a text that a caller's truncation cuts, which the tokenizer as loaded here does not
    show; and the names of a batch's tensors."""
    held = _stored(folder / "tokenizer_config.json")
    code, side = held.get(CODE), held.get("truncation_side") or type(tokenizer).truncation_side
    names = (json.dumps(code, sort_keys=True) if code else "none", str(side), ", ".join(tokenizer.model_input_names))
    return dict(zip(LATER, names, strict=True))


def _stored(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


# --- parts ----------------------------------------------------------------------------------------------------------


def _parts(content: dict[str, Any] | None, folder: Path) -> dict[str, str]:
    """Hashes of the parts of tokenizer.json as the library writes it. Truncation and padding come from the file itself,
    because transformers sets them anew at each call and other readers obey the file."""
    if content is None:
        files = (path for pattern in _FILES for path in folder.glob(pattern))
        return {"files": _hash(sorted((p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files))}
    model = dict(content["model"])
    merges, vocabulary = model.pop("merges", None), model.pop("vocab", None)
    scores = vocabulary if isinstance(vocabulary, list) else None  # unigram: a list of tokens with their scores
    found = {"merges": merges, "model": [model, scores], "added tokens": content.get("added_tokens")}
    found["normaliser"] = content.get("normalizer")
    found |= {name.replace("_", "-"): content.get(name) for name in ("pre_tokenizer", "post_processor", "decoder")}
    stored = _stored(folder / "tokenizer.json")
    found |= {name: stored.get(name) for name in CALLS}
    return {name: "none" if value is None else _hash(value) for name, value in found.items()}


def _canonical(template: object) -> str:
    """The template as one text, also for several templates by name."""
    if template is None:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def _template_fault(template: object) -> str | None:
    """The fault of the first template that has one."""
    texts = template.values() if isinstance(template, dict) else [template]
    faults = (template_fault(text) for text in texts if isinstance(text, str) and text)
    return next((fault for fault in faults if fault), None)


def _template_fails(tokenizer: Any) -> str | None:
    where = "one message of a user"
    try:
        written(tokenizer, conversation([{"role": USER, "content": "Hello"}], where, 1))
    except CheckpointError as fault:
        return str(fault).removeprefix(f"{where}: the chat template ").partition("; give")[0]
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16] if text else "none"


def _hash(value: object) -> str:
    return _digest(json.dumps(value, sort_keys=True, ensure_ascii=True))


def _placeholders(tokenizer: Any, numbers: Mapping[str, int]) -> Iterator[int]:
    """Ids of tokens that the tokenizer names after another modality, such as image_token. numbers: token -> id, for all
    tokens."""
    for role, token in named_tokens(tokenizer).items():
        if role.startswith(_OTHER_MODALITIES) and token in numbers:
            yield int(numbers[token])


# --- the round trip -------------------------------------------------------------------------------------------------


def _writes_every_byte(content: dict[str, Any], tokens: Container[str]) -> bool:
    """Whether the tokenizer can write every byte: it is byte-level, or falls back to a token per byte, and has all 256
    tokens."""
    kinds = set(_kinds([content.get("decoder"), content.get("pre_tokenizer")]))
    if "ByteLevel" in kinds:
        return all(char in tokens for char in byte_alphabet())
    return "ByteFallback" in kinds and all(f"<0x{byte:02X}>" in tokens for byte in range(256))


def _kinds(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for value in part.values():
            yield from _kinds(value)
    elif isinstance(part, list):
        for value in part:
            yield from _kinds(value)


def _comes_back(tokenizer: Any, text: str) -> bool:
    """Whether decoding the tokens gives back the text, except for what the normaliser changes and spaces in front,
    which some tokenizers add."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False).lstrip(" ")
    if back == text.lstrip(" "):
        return True
    normaliser = tokenizer.backend_tokenizer.normalizer
    if normaliser is None:
        return False
    # the decoder undoes the marks that a normaliser puts in place of spaces
    return bool(back == normaliser.normalize_str(text).replace("\u2581", " ").lstrip(" "))
