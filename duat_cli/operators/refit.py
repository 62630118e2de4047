"""Least squares for a linear layer's change, from sums over tokens, so that no token is kept in memory.

With X (n, K) the remaining inputs of a layer and R (n, M) what its output lacks, the change D of the remaining weights
is

    D = argmin |R - X D|^2 + λ |D|^2 = (XᵀX + λ I)⁻¹ Xᵀ R,    λ = c tr(XᵀX) / K

(Tikhonov's regularisation, Hoerl & Kennard 1970). The ridge pulls to the weights as they are, not to zero. A bias is
one more input, without ridge: the rest of R then has mean zero, and D is that of inputs less their means. Sums are
float64: XᵀX squares the condition number, and float32 would leave no digit of the small singular values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Values of c, a multiple of the mean square of a remaining input."""


class Moments:
    """Sums over the tokens of one layer."""

    def __init__(self, features: int, outputs: int, device: torch.device, *, bias: bool = False) -> None:
        """bias: whether the last feature is that of the bias, equal for all tokens up to the token's weight."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.gram, self.cross, self.lacking = zeros(features, features), zeros(features, outputs), zeros()
        self.tokens, self._penalised = 0, features - bias

    def add(self, inputs: Tensor, lacking: Tensor) -> None:
        """Adds tokens. inputs: (n, K). lacking: R, (n, M). Both float64, multiplied by √(the token's weight)."""
        self.gram.addmm_(inputs.T, inputs)
        self.cross.addmm_(inputs.T, lacking)
        self.lacking += lacking.square().sum()
        self.tokens += len(inputs)

    def join(self, other: Moments) -> None:
        """Adds the sums of `other` to these."""
        self.gram += other.gram
        self.cross += other.cross
        self.lacking += other.lacking
        self.tokens += other.tokens

    def change(self, ridge: float) -> Tensor | None:
        """D, (K, M); None where the sums leave it undetermined in float64. ridge: c."""
        diagonal = self.gram.diagonal()[: self._penalised]
        size = float(diagonal.mean()) if len(diagonal) else 0.0
        if not size > 0:
            return None
        lifted = self.gram.clone()
        lifted.diagonal()[: self._penalised].add_(ridge * size)
        factor, fault = torch.linalg.cholesky_ex(lifted)
        return None if int(fault) else torch.cholesky_solve(self.cross, factor)

    def error(self, change: Tensor) -> float:
        """|R - X D|^2 over these tokens, from the sums."""
        return float(self.lacking - 2 * (change * self.cross).sum() + (change * (self.gram @ change)).sum())


def chosen_ridge(fit: Moments, back: Moments, near: float | None = None) -> float | None:
    """The ridge whose change, fitted on the tokens of `fit`, leaves the least error on those of `back`; None where no
    ridge's change leaves less error than no change.

    near: one of `RIDGES`, which ascend. The search goes from it to the nearest ridge with no better neighbour, which
    takes fewer solutions and finds the best of all if the error has one minimum.
    """
    errors: dict[int, float] = {}

    def error(place: int) -> float:
        if place not in errors:
            change = fit.change(RIDGES[place])
            errors[place] = math.inf if change is None else back.error(change)
        return errors[place]

    places: Sequence[int] = range(len(RIDGES))
    best = min(places, key=error) if near is None else RIDGES.index(near)
    while near is not None:
        beside = min((k for k in (best - 1, best + 1) if k in places), key=error)
        if not error(beside) < error(best):
            break
        best = beside
    return RIDGES[best] if error(best) < float(back.lacking) else None
