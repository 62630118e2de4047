"""What a tokenizer is, apart from the bytes of its files: what it makes of texts, and which ids it can give.

Asked of the tokenizer that transformers made of the files, which is the one that runs.
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
"""Ranges of ids that a vocabulary is hashed in, to say where two of them differ."""
DIGITS = 4  # of a range's hash; the hash of the whole decides whether two vocabularies are equal
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SETTINGS = ("padding_side", "model_max_length", "clean_up_tokenization_spaces", "split_special_tokens")
CALLS = ("truncation", "padding")  # parts of tokenizer.json for a reader that calls with no options
CODE = "auto_map"
LATER = (CODE, "truncation_side", "model_input_names")  # fields that older baselines know nothing of
_OTHER_MODALITIES = ("image", "audio", "video", "vision", "boi", "eoi", "boa", "eoa")
_FILES = ("*.model", "vocab.txt", "vocab.json", "merges.txt", "spiece*", "*.tiktoken")  # of one without tokenizer.json


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer, as the rules and a baseline need it."""

    vocabulary: dict[int, str]
    """Id -> token, added ones included."""
    parts: dict[str, str]
    """Part, such as 'merges' -> hash of its content; 'none' for a part that there is not."""
    fields: dict[str, str | int | bool]
    """Special tokens by role, and settings."""
    roles: dict[str, int]
    """'bos_token' and its kin -> id."""
    special: frozenset[int]
    """Ids of special tokens."""
    placeholders: frozenset[int]
    """Of these, ids that stand for images, sound and video, which no text becomes."""
    template: str
    """The chat template; empty for none."""
    template_fault: str | None
    """Why that cannot be compiled; None where it can, or there is none."""
    template_fails: str | None
    """Why that, compiled, does not write out one message of a user; None where it does."""
    starts_with_bos: bool
    """Whether it puts its bos token in front of a text."""
    lost: tuple[str, ...]
    """Texts that do not come back from their tokens, of a tokenizer that can write every byte."""

    @property
    def size(self) -> int:
        """One above the largest id."""
        return max(self.vocabulary, default=-1) + 1

    def ranges(self, size: int) -> str:
        """Hashes of the tokens of consecutive ids, `range_length(size)` ids each, together."""
        step = range_length(size)
        found = by_key((pair[0] // step, pair) for pair in sorted(self.vocabulary.items()))
        return "".join(_hash(found.get(number, []))[:DIGITS] for number in range(-(-size // step)))


def range_length(size: int) -> int:
    """Ids in each of at most `RANGES` ranges of a vocabulary of `size` ids."""
    return max(1, -(-size // RANGES))


def tokenizer_facts(tokenizer: Any, folder: Path, texts: Sequence[str]) -> TokenizerFacts:
    """Of a tokenizer of transformers; texts: what its round trip is tried on. CheckpointError where it fails."""
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
    """Of the token ids of all prompts, in order."""
    return _hash([list(map(int, ids)) for ids in prompts])


def texts_hash(texts: Iterable[str], max_tokens: int | None) -> str:
    """Of the texts that were asked for, and of how many tokens of each."""
    return _hash([max_tokens, *(hashlib.sha256(text.encode()).hexdigest() for text in texts)])


def _fields(tokenizer: Any, roles: Iterable[str]) -> dict[str, str | int | bool]:
    found: dict[str, str | int | bool] = {role: str(getattr(tokenizer, role)) for role in roles}
    for name in _SETTINGS:
        value = getattr(tokenizer, name, None)
        if isinstance(value, str | int):
            found[name] = value
    return found


def _stated(tokenizer: Any, folder: Path) -> dict[str, str]:
    """LATER: the classes of the checkpoint's own code that tokenizer_config.json names, which run where a caller trusts
    it; which end of a text a caller's truncation keeps, which the tokenizer as it runs here does not say; and what a
    batch holds."""
    held = _stored(folder / "tokenizer_config.json")
    code, side = held.get(CODE), held.get("truncation_side") or type(tokenizer).truncation_side
    names = (json.dumps(code, sort_keys=True) if code else "none", str(side), ", ".join(tokenizer.model_input_names))
    return dict(zip(LATER, names, strict=True))


def _stored(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


# --- parts ----------------------------------------------------------------------------------------------------------


def _parts(content: dict[str, Any] | None, folder: Path) -> dict[str, str]:
    """Of tokenizer.json as the library writes it. Truncation and padding, which transformers sets anew at each call and
    other readers obey, are those of the file."""
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
    """Several templates by name are one text."""
    if template is None:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def _template_fault(template: object) -> str | None:
    """Of the first template, of several by name, that has one."""
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
    """Ids of tokens that the tokenizer names after another modality, such as image_token. numbers: of all tokens."""
    for role, token in named_tokens(tokenizer).items():
        if role.startswith(_OTHER_MODALITIES) and token in numbers:
            yield int(numbers[token])


# --- the round trip -------------------------------------------------------------------------------------------------


def _writes_every_byte(content: dict[str, Any], tokens: Container[str]) -> bool:
    """Byte-level, or with a token for each byte, and with all 256 of them."""
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
    """Up to what the normaliser changes, which is meant, and spaces in front, which some put there."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False).lstrip(" ")
    if back == text.lstrip(" "):
        return True
    normaliser = tokenizer.backend_tokenizer.normalizer
    if normaliser is None:
        return False
    # the decoder undoes the marks that a normaliser puts in place of spaces
    return bool(back == normaliser.normalize_str(text).replace("\u2581", " ").lstrip(" "))
