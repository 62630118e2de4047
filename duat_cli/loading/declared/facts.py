"""All that a checkpoint states about itself, in the form in which rules read it and baselines store it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from duat_cli.loading.declared.embedder import Embedder
from duat_cli.loading.declared.tokenizer import TokenizerFacts

CONFIG, FILE, GENERATION, TOKENIZER, EMBEDDER = "config", "file", "generation", "tokenizer", "embedder"
PROCESSOR = "processor"
"""First parts of a baseline's keys: resolved config, config.json where it differs, and so on."""
RESOLVED_BY = "resolved_by"


@dataclass(frozen=True)
class Declared:
    """Known facts about the checkpoint; None for a fact that was not looked up."""

    stated: dict[str, Any]
    """Fields of config.json as written."""
    generation: dict[str, Any]
    """Fields of generation_config.json as written."""
    resolved: dict[str, Any] | None = None
    """Fields of the config with its class's defaults; needs the load."""
    resolved_by: str = ""
    """Version of transformers whose defaults these are."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    generation_fault: str | None = None
    """Why transformers refuses generation_config.json; None where it does not, or was not asked."""
    sampling_fault: str | None = None
    """Why transformers refuses to generate with it; None where it does not, or was not asked."""
    tokenizer: TokenizerFacts | None = None
    rows: int | None = None
    """Rows of the input embedding; needs the load."""
    texts: str | None = None
    """Hash of the prompts' texts."""
    tokens: str | None = None
    """Hash of the prompts' token ids."""
    embedder: Embedder = field(default_factory=Embedder)
    """Facts from sentence-transformers' files."""
    processor: dict[str, Any] = field(default_factory=dict)
    """Fields of the processors of pictures and sounds, by file."""

    def entries(self) -> dict[str, Any]:
        """Key -> value, for a baseline."""
        return dict(self._entries())

    def _entries(self) -> Iterator[tuple[str, Any]]:
        known = self.resolved or {}
        if self.resolved is not None:
            yield RESOLVED_BY, f"transformers {self.resolved_by}"
        yield from ((f"{CONFIG}.{name}", value) for name, value in known.items())
        yield from ((f"{FILE}.{name}", value) for name, value in self.stated.items() if known.get(name) != value)
        yield from ((f"{GENERATION}.{name}", value) for name, value in self.generation.items())
        yield from ((f"{EMBEDDER}.{name}", value) for name, value in self.embedder.fields.items())
        yield from ((f"{PROCESSOR}.{name}", value) for name, value in self.processor.items())
        if self.tokenizer is not None:
            size = self.tokenizer.size
            yield f"{TOKENIZER}.size", size
            yield f"{TOKENIZER}.ranges", self.tokenizer.ranges(size)
            yield from ((f"{TOKENIZER}.parts.{name}", value) for name, value in self.tokenizer.parts.items())
            yield from ((f"{TOKENIZER}.fields.{name}", value) for name, value in self.tokenizer.fields.items())


def below(entries: Mapping[str, Any], first: str) -> dict[str, Any]:
    """The entries whose keys begin with 'first.'; the returned keys lack it."""
    return {key.removeprefix(f"{first}."): value for key, value in entries.items() if key.startswith(f"{first}.")}
