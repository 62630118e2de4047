"""Hashes by which a baseline recognises the inputs of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from duat_cli.analysis.opening import PromptRequest
from duat_cli.loading.declared.tokenizer import texts_hash, tokens_hash
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.texts import PromptText


def asked_hash(texts: PromptRequest, read: Sequence[PromptText]) -> str:
    """Hash of the inputs as given, which does not depend on tokenizer and processor."""
    said = texts_hash((text.hashed for text in read), texts.max_tokens)
    beside = [*_beside(texts.files or InputFiles())]
    return hashlib.sha256(json.dumps([said, *beside]).encode()).hexdigest() if beside else said


def _beside(files: InputFiles) -> Iterator[tuple[str, str]]:
    """Options and hashes of inputs other than texts."""
    for option, names in files.by_option:
        for name in names:
            with Path(name).open("rb") as file:
                yield option, hashlib.file_digest(file, "sha256").hexdigest()
    if files.stack is not None:
        yield "--stack", files.stack
    if files.decoder_prompt is not None:
        yield "--decoder-prompt", files.decoder_prompt


def made_hash(inputs: Sequence[Prompt]) -> str:
    """Hash of the token ids, or of the tensors, that the model reads."""
    if any(one.prepared is not None for one in inputs):
        return hashlib.sha256(" ".join(one.sha256 for one in inputs).encode()).hexdigest()
    return tokens_hash(one.input_ids[0].tolist() for one in inputs)
