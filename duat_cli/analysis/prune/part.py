"""What one prompt gives of all terms, before any set is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from duat_cli.analysis.prune.terms.criteria import Activations
from duat_cli.analysis.prune.terms.readings import Readings


@dataclass(frozen=True)
class Responded:
    """What its gradients gave."""

    responses: Tensor
    """(probes, terms), float32."""
    slope: Tensor | None
    """(terms,), float32: the response to the gradient of the loss; None where there is no loss."""
    loss: tuple[float, int] | None
    """Its own loss, nats a token, and the size of the vocabulary."""


@dataclass(frozen=True)
class Measured:
    """What its sweep and its ablations gave."""

    readings: Readings
    error: float
    """Of the certificate, largest over the blocks."""
    damages: list[float]
    """Of every term in the sample, kind by kind."""
    moved: list[float]
    """The same: |change of the last block's output| / |that output|."""


@dataclass(frozen=True)
class Part:
    """All of it."""

    responded: Responded
    measured: Measured
    seen: Activations = field(default_factory=Activations)
    """What its sites held; empty where that is added up elsewhere."""
