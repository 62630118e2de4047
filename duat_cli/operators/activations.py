"""Activation functions that can be bounded, each with its turning points.

A unit's activation is recognised by its values, not by a name: the float64 formulas here are compared with the model's.
Between two turning points, and beyond the outer ones, each function is monotone, so its largest size on an interval
is attained at an end or at a turning point inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Activation:
    """One scalar function, applied entry by entry."""

    name: str
    function: Callable[[Tensor], Tensor]
    turns: tuple[float, ...] = ()
    """The points where its derivative changes sign."""
    below_identity: bool = False
    """Whether |σ(t)| ≤ |t| for every t."""

    def __call__(self, t: Tensor) -> Tensor:
        return self.function(t)

    def maximum(self, low: Tensor, high: Tensor) -> Tensor:
        """max of |σ| over [low, high], entry by entry; low ≤ high."""
        best = torch.maximum(self(low).abs(), self(high).abs())
        for turn in self.turns:
            size = self(torch.tensor(turn, dtype=low.dtype)).abs().to(low.device)
            best = torch.where((low < turn) & (turn < high), torch.maximum(best, size), best)
        return best


KNOWN = (
    Activation("identity", lambda t: t, below_identity=True),
    Activation("relu", torch.relu, below_identity=True),
    Activation("relu squared", lambda t: torch.relu(t).square()),
    Activation("gelu", functional.gelu, (-0.7517915246935645,), below_identity=True),
    Activation(
        "gelu (tanh)", partial(functional.gelu, approximate="tanh"), (-0.7524614220710163,), below_identity=True
    ),
    Activation("silu", functional.silu, (-1.2784645427610738,), below_identity=True),
    Activation("quick gelu", lambda t: t * torch.sigmoid(1.702 * t), (-0.7511542554412889,), below_identity=True),
    Activation("mish", functional.mish, (-1.1924312399780397,), below_identity=True),
    Activation("hardswish", functional.hardswish, (-1.5,), below_identity=True),
    Activation("leaky relu", functional.leaky_relu, below_identity=True),
    Activation("relu6", functional.relu6, below_identity=True),
    Activation("elu", functional.elu, below_identity=True),
    Activation("selu", functional.selu),
    Activation("gelu, clipped at 10", lambda t: functional.gelu(t).clamp(-10, 10), (-0.7517915246935645,), True),
    Activation("tanh", torch.tanh, below_identity=True),
    Activation("sigmoid", torch.sigmoid),
    Activation("softplus", functional.softplus),
)

ENOUGH_SPREAD = 12.0  # |t| that the values must reach on both sides before a function counts as recognised


def recognise(t: Tensor, value: Tensor, factor: Tensor | None, tolerance: float) -> Activation | None:
    """The known function with σ(t) · factor = value, entry by entry; None where there is none, or more than one.

    Entries are equal up to `tolerance`, relative to |factor| times the largest of |σ(t)|, |t| and 1. Functions that
    agree near 0 (relu and relu6, say) are told apart further out, so the result is None unless t reaches far on both
    sides.
    """
    t, value = t.double(), value.double()
    scale = torch.ones_like(t) if factor is None else factor.double()
    if t.numel() == 0 or float(t.max()) < ENOUGH_SPREAD or float(t.min()) > -ENOUGH_SPREAD:
        return None
    fitting = []
    for known in KNOWN:
        expected = known(t)
        size = torch.maximum(expected.abs(), t.abs()).clamp_min(1.0) * scale.abs()
        if bool(((expected * scale - value).abs() <= tolerance * size).all()):
            fitting.append(known)
    return fitting[0] if len(fitting) == 1 else None
