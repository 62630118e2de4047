"""What stands in the files of a folder of results: who made them, and one line a prompt that proves itself whole."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from duat_cli.analysis.inspect.total import InspectHead, PromptSweep
from duat_cli.analysis.inspect.untrained import BlockNull
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.activations import Place
from duat_cli.results.base import Certificate
from duat_cli.results.inspect import EndToEnd, PromptBlock, UatTerm


class Stored(BaseModel):
    """Base of what is written. Infinity, the largest activation of a model that overflows, is the text "Infinity"."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Settings(Stored):
    """The options that numbers or the report follow from."""

    layers: list[int]
    threshold: float
    conv_width: int
    spectrum: bool
    terms: bool
    end_to_end: bool
    routing: bool
    per_prompt: bool
    null: Literal["all", "uniform"]
    max_tokens: int | None


class Manifest(Stored):
    """What all results of a folder have in common."""

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
    settings: Settings
    head: InspectHead
    certificate: Certificate
    """Of the process that began: its tolerance, and how attention is seen, are everybody's."""

    @property
    def has_nulls(self) -> bool:
        """Whether there is a re-initialised model beside this one."""
        return self.settings.null == "all"

    def same(self) -> dict[str, object]:
        """What has to agree before results are put together, by its name."""
        env = self.head.environment
        return {
            "version of duat": self.duat_version,
            "version of torch": env.torch,
            "version of transformers": env.transformers,
            "version of Python": env.python,
            "platform": env.platform,
            "dtype": env.dtype,
            "device": env.device,
            "way to read weights": "block by block" if self.in_parts else "in memory",
            "model": self.head.model.fingerprint,
            "config": self.arithmetic,
            "tokenizer": self.tokenizer,
            "prompt set": self.prompt_set,
            **{f"--{name.replace('_', '-')}": value for name, value in self.settings.model_dump().items()},
        }

    def seal(self) -> bytes:
        """What ties a line to its manifest."""
        return hashlib.sha256(repr(self.same()).encode()).digest()


class BlockRecord(Stored):
    index: int
    row: PromptBlock
    largest: float
    place: Place


class PromptRecord(Stored):
    """What one prompt gave."""

    line: int
    """In its file, or the number of its option."""
    text: str
    tokens: list[int]
    error: float
    """Largest over the blocks of the certificate."""
    plain_error: float
    """Of the process: its model against the one without instruments."""
    blocks: list[BlockRecord]
    terms: list[UatTerm]
    end_to_end: EndToEnd | None
    faults: dict[int, str]

    @classmethod
    def of(cls, prompt: Prompt, sweep: PromptSweep, plain_error: float) -> PromptRecord:
        blocks = [
            BlockRecord(index=i, row=row, largest=sweep.largest[i][0], place=sweep.largest[i][1])
            for i, row in sweep.blocks.items()
        ]
        return cls(
            line=prompt.line,
            text=prompt.text,
            tokens=prompt.input_ids[0].tolist(),
            error=max(sweep.errors),
            plain_error=plain_error,
            blocks=blocks,
            terms=sweep.terms,
            end_to_end=sweep.end_to_end,
            faults=sweep.faults,
        )

    def sweep(self) -> PromptSweep:
        return PromptSweep(
            blocks={b.index: b.row for b in self.blocks},
            errors=[self.error],
            terms=self.terms,
            end_to_end=self.end_to_end,
            faults=self.faults,
            largest={b.index: (b.largest, b.place) for b in self.blocks},
        )


class NullRecord(Stored):
    """The re-initialised architecture under one count of tokens, or why it has no numbers."""

    seal: str
    blocks: list[BlockNull]
    reason: str


# --- lines ------------------------------------------------------------------------------------------

_LINE = re.compile(rb'\{"check":"(.{32})",("position":(\d+),"sha256":"(.{64})","tokens":(\d+),"record":(\{.*\}))\}\n')


@dataclass(frozen=True)
class Line:
    """A whole line of a shard."""

    position: int
    """Of the prompt in its set, from 0: the same text may stand there twice."""
    sha256: str
    tokens: int
    record: bytes
    """A PromptRecord as JSON."""


def written(seal: bytes, position: int, prompt: Prompt, record: PromptRecord) -> bytes:
    """The line of a record, as JSON, with a hash of it and of the manifest in front."""
    head = f'"position":{position},"sha256":"{prompt.sha256}","tokens":{len(record.tokens)},"record":'
    body = head.encode() + record.model_dump_json().encode()
    return b'{"check":"%s",%s}\n' % (_check(seal, body), body)


def read(seal: bytes, line: bytes) -> Line | None:
    """None for a line that is cut off, changed, or of another manifest."""
    match = _LINE.fullmatch(line)
    if match is None or match[1] != _check(seal, match[2]):
        return None
    return Line(int(match[3]), match[4].decode(), int(match[5]), match[6])


def _check(seal: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=seal, digest_size=16).hexdigest().encode()
