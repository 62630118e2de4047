"""How probable a target is under the model's own output, and which other token is most."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from duat_cli.analysis.attribute.targets import Target


@dataclass(frozen=True)
class Odds:
    """Probabilities by softmax over all tokens."""

    own: float
    rival: int
    """The most probable other token."""
    rivals: float


def odds_of(target: Target, output: Tensor) -> Odds | None:
    """Of a token in an output, (1, N, vocabulary), computed in float64; None of a target that is no token."""
    if target.token is None or target.kind not in ("token", "log-probability"):
        return None
    found = target.row(output).double().softmax(dim=-1)
    others = found.clone()
    others[target.token] = -1.0
    rival = int(others.argmax())
    return Odds(float(found[target.token]), rival, float(found[rival]))
