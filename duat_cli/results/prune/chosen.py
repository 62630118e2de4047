"""The set of terms that `duat prune-bound --export` writes: stable names and indices, and the modules they are in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from duat_cli.kinds import Kind
from duat_cli.results.base import SCHEMA_VERSION, Result


class ChosenTerm(Result):
    """One term of a set that was chosen for removal."""

    kind: Kind
    block: int = Field(description="number of the block call that the term is in, from 0")
    index: int | None = Field(
        description="number of the term among those of its kind in its block, from 0; null for a block"
    )
    module: str = Field(description="name in the model of the module that holds the term")
    place: Literal["input", "output", "routing", "whole"] = Field(
        description="where the term is in its module: some features of the input, the output, one expert, or all of "
        "the module"
    )
    features: tuple[int, int] | None = Field(
        description="features of the module's input, [first, past the last), where `place` is 'input'; [expert, expert "
        "+ 1) for 'routing'; otherwise null"
    )


class ChosenSet(Result):
    """Set of terms chosen for removal."""

    schema_version: str = SCHEMA_VERSION
    model: str
    revision: str | None
    fingerprint: str = Field(description="content hash of the loaded weights, as in every report")
    blocks: int = Field(description="number of block calls of the model")
    terms: tuple[ChosenTerm, ...]
