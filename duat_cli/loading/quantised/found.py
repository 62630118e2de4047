"""What a format finds among the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duat_cli.loading.quantised.formula import Formula


class UnknownFormatError(Exception):
    """A way to quantise that is not read."""


@dataclass(frozen=True)
class Found:
    """The weights of a quantised checkpoint."""

    format: str
    """How they are stored, in words."""
    weights: Mapping[str, Formula]
    """By the name that the weight has in full precision."""
    beside: frozenset[str] = frozenset()
    """Tensors that no weight needs: what activations or caches would be quantised with."""


def leaf_of(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]
