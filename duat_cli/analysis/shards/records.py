"""Contents of the files in a folder of results: a manifest, and one line per prompt with a hash that shows it whole."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, JsonValue, PlainSerializer, PlainValidator
from torch import Tensor

from duat_cli.loading.prompts import Prompt
from duat_cli.results.base import Environment


class Stored(BaseModel):
    """Base class of everything written. Infinity (an activation that overflows) is the text "Infinity"."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Manifest(Stored):
    """Facts that all results in a folder share."""

    command: str
    """Name of duat's command."""
    duat_version: str
    in_parts: bool
    """Whether weights were read block by block."""
    arithmetic: str
    """Hash of weights, class, config and versions."""
    tokenizer: str
    """Hash of the tokenizer's files."""
    prompts: int
    prompt_set: str
    """Hash of the texts and their order."""
    environment: Environment
    fingerprint: str
    """Fingerprint of the weights."""
    settings: dict[str, JsonValue]
    """Options that numbers or the report depend on, by name; arguments in capitals."""
    facts: dict[str, JsonValue]
    """The part of the command's report that no prompt changes, from the process that began the folder."""

    def same(self) -> dict[str, object]:
        """Everything that has to agree before results are put together, by name."""
        env = self.environment
        return {
            "command": self.command,
            "version of duat": self.duat_version,
            "version of torch": env.torch,
            "version of transformers": env.transformers,
            "version of Python": env.python,
            "platform": env.platform,
            "dtype": env.dtype,
            "device": env.device,
            "way to read weights": "block by block" if self.in_parts else "in memory",
            "model": self.fingerprint,
            "config": self.arithmetic,
            "tokenizer": self.tokenizer,
            "prompt set": self.prompt_set,
            **{n if n.isupper() else f"--{n.replace('_', '-')}": value for n, value in self.settings.items()},
        }

    def seal(self) -> bytes:
        """Key of the hashes in lines, which ties them to this manifest."""
        return hashlib.sha256(repr(self.same()).encode()).digest()


class PromptRecord(Stored):
    """Results of one prompt; each command adds its own numbers."""

    line: int
    """Number of the prompt's line in its file, or of its option."""
    text: str
    tokens: list[int]


def of_prompt(prompt: Prompt) -> dict[str, Any]:
    """The fields of a prompt that every record has."""
    return {"line": prompt.line, "text": prompt.text, "tokens": prompt.input_ids[0].tolist()}


class Aside(Stored):
    """Results that belong to no prompt, in a file of their own."""

    seal: str = ""
    """Seal of the manifest, in hexadecimal; set when it is written."""


# --- tensors ----------------------------------------------------------------------------------------


def packed(values: Tensor) -> str:
    """The dtype of a vector, and base64 text of its little-endian numbers: float64 as it is, others as float32."""
    kind = "<f8" if values.dtype == torch.float64 else "<f4"
    return f"{kind} {base64.b64encode(values.cpu().contiguous().numpy().astype(kind).tobytes()).decode()}"


def unpacked(found: object) -> Tensor:
    """The vector from packed text; a vector as it is."""
    if isinstance(found, Tensor):
        return found
    kind, _, text = str(found).partition(" ")
    values = np.frombuffer(base64.b64decode(text), dtype=kind)
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))


Packed = Annotated[Tensor, PlainValidator(unpacked), PlainSerializer(packed)]
"""A vector in a record, which files hold as text."""


# --- lines ------------------------------------------------------------------------------------------

_LINE = re.compile(rb'\{"check":"(.{32})",("position":(\d+),"sha256":"(.{64})","tokens":(\d+),"record":(\{.*\}))\}\n')


@dataclass(frozen=True)
class Line:
    """A whole line of a shard."""

    position: int
    """Position of the prompt in its set, from 0; the same text may be there twice."""
    sha256: str
    tokens: int
    record: bytes
    """The command's PromptRecord as JSON."""


def written(seal: bytes, position: int, prompt: Prompt, record: PromptRecord) -> bytes:
    """The line of a record, as JSON, which begins with a hash keyed by the manifest's seal."""
    head = f'"position":{position},"sha256":"{prompt.sha256}","tokens":{len(record.tokens)},"record":'
    body = head.encode() + record.model_dump_json().encode()
    return b'{"check":"%s",%s}\n' % (_check(seal, body), body)


def read(seal: bytes, line: bytes) -> Line | None:
    """The parsed line; None if it is cut off, changed, or of another manifest."""
    match = _LINE.fullmatch(line)
    if match is None or match[1] != _check(seal, match[2]):
        return None
    return Line(int(match[3]), match[4].decode(), int(match[5]), match[6])


def _check(seal: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=seal, digest_size=16).hexdigest().encode()
