"""What a gate has a model read: texts, or what stands in their place, and by what a baseline knows it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duat_cli.analysis.decoding import with_chosen_blocks
from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest, load_found, tokens_of
from duat_cli.analysis.prepared import open_prepared, part_of
from duat_cli.analysis.progress import Progress
from duat_cli.errors import InputError
from duat_cli.loading.declared.tokenizer import texts_hash, tokens_hash
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.texts import PromptText


@dataclass(frozen=True)
class Reading:
    """A model, loaded, and what it reads."""

    loaded: LoadedModel
    tokenizer: Any
    """None of a model that reads no text."""
    inputs: list[Prompt]
    fault: InputError | None = None
    """Why the texts cannot be made tokens."""


def open_reading(
    model: ModelRequest, found: Found, texts: PromptRequest, read: list[PromptText], progress: Progress
) -> Reading:
    """As `open_session`, with the tokenizer; read: the texts. Where they cannot be made tokens, the model alone."""
    files, trust = texts.files or InputFiles(), model.trust_remote_code
    whole = replace(files, stack=None) if files.names_blocks else files
    made, tokenizer = open_prepared(model, found, replace(texts, files=whole), whole, read, progress), None
    if made is None:
        loaded, tokenizer = load_found(model, found, texts, read, progress)
        loaded = part_of(loaded, whole.part)
        try:
            made = tokens_of(loaded, tokenizer, texts, read)
        except InputError as fault:
            return Reading(loaded, tokenizer, [], fault)
    loaded, inputs = made
    if files.names_blocks:
        loaded, inputs = with_chosen_blocks(loaded, inputs, files, trust_remote_code=trust)
    return Reading(loaded, tokenizer, inputs)


def asked_hash(texts: PromptRequest, read: Sequence[PromptText]) -> str:
    """Of what was asked to be read, whatever tokenizer and processor make of it."""
    said = texts_hash((text.text for text in read), texts.max_tokens)
    beside = [*_beside(texts.files or InputFiles())]
    return hashlib.sha256(json.dumps([said, *beside]).encode()).hexdigest() if beside else said


def _beside(files: InputFiles) -> Iterator[tuple[str, str]]:
    """Beside texts."""
    for option, names in (("--image", files.images), ("--audio", files.sounds), ("--inputs", files.tensors)):
        for name in names:
            with Path(name).open("rb") as file:
                yield option, hashlib.file_digest(file, "sha256").hexdigest()
    if files.stack is not None:
        yield "--stack", files.stack
    if files.decoder_prompt is not None:
        yield "--decoder-prompt", files.decoder_prompt


def made_hash(inputs: Sequence[Prompt]) -> str:
    """Of the token ids, or the tensors, that it became."""
    if any(one.prepared is not None for one in inputs):
        return hashlib.sha256(" ".join(one.sha256 for one in inputs).encode()).hexdigest()
    return tokens_hash(one.input_ids[0].tolist() for one in inputs)
