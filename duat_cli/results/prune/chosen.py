"""The set of terms that `duat prune-bound --export` writes: stable names and indices, and the modules they are in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from duat_cli.kinds import Kind
from duat_cli.results.base import SCHEMA_VERSION, Result


class ChosenTerm(Result):
    """One term."""

    kind: Kind
    block: int = Field(description="number of the block call, from 0")
    index: int | None = Field(description="among the terms of its kind in that block, from 0; null for a block")
    module: str = Field(description="the module that holds it, by its name in the model")
    place: Literal["input", "output", "routing", "whole"] = Field(
        description="where in that module: some features of its input, its output, one expert, or all of it"
    )
    features: tuple[int, int] | None = Field(
        description="for 'input': the features [first, past the last); for 'routing': [expert, expert + 1)"
    )


class ChosenSet(Result):
    """A set of terms chosen for removal."""

    schema_version: str = SCHEMA_VERSION
    model: str
    revision: str | None
    fingerprint: str = Field(description="of the loaded weights, as in every report")
    blocks: int = Field(description="block calls of the model")
    terms: tuple[ChosenTerm, ...]
