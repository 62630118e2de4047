"""The options that numbers of `duat inspect` follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class InspectOptions:
    """What `duat inspect` computes beyond the default."""

    layers: frozenset[int] | None = None
    threshold: float = 0.01
    conv_width: int = 3
    spectrum: bool = False
    terms: bool = False
    end_to_end: bool = False
    routing: bool = False
    heads: bool = False
    per_prompt: bool = False
    null: Literal["all", "uniform"] = "uniform"  # "all": of the re-initialised architecture as well
    cache: bool = True
