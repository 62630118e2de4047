"""Code without gradients: tensors that change its output, though by its graph they do not.

A missing gradient alone proves nothing, because behind weights of zero the output does not change either. So each
tensor without a gradient is changed, and the output compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, tolerance_for
from duat_cli.models.terms.sites import Edit, Site


def without_gradient(where: str) -> UnsupportedModelError:
    """The error for code whose output depends on a tensor that it gives no gradient of."""
    return UnsupportedModelError(
        f"{where}: gives no gradient of some of what it computes (its own code, or a hook, detaches a tensor or runs "
        "under torch.no_grad), and what duat reads here are gradients"
    )


@dataclass(frozen=True)
class Again:
    """A block that can be run again, to test whether it depends on tensors of which its graph shows no gradient:
    weights may be zero, or code may detach a tensor."""

    run: Callable[[Sequence[Tensor], Edit], Tensor]
    read: Sequence[Tensor]  # its input, and the tensors that earlier blocks hand on
    after: Tensor  # its output
    values: list[Tensor]  # tensors of the sites, in call order

    def any_moves(self, places: Sequence[int]) -> bool:
        """Whether the tensor of any of these sites changes with the block's input."""
        if not places:
            return False
        found: list[Tensor] = []
        with torch.no_grad():
            self.run([_shaken(self.read[0]), *self.read[1:]], lambda _site, value, _index: found.append(value.clone()))
        known = self.values
        return len(found) == len(known) and any(
            found[k].shape == known[k].shape and not _same(found[k], known[k]) for k in places
        )

    def moved_by(self, places: Sequence[int], probes: Tensor) -> bool:
        """Whether ⟨probe, output⟩ changes with the tensor of any of these sites, or of `read`, numbered behind them."""
        return any(self._moved_by(place, probes) for place in places)

    def _moved_by(self, place: int, probes: Tensor) -> bool:
        count, read = -1, list(self.read)

        def shake(_site: Site, value: Tensor, _index: Tensor | None) -> Tensor | None:
            nonlocal count
            count += 1
            return _shaken(value) if count == place else None

        if place >= len(self.values):
            read[place - len(self.values)] = _shaken(read[place - len(self.values)])
        with torch.no_grad():
            after = self.run(read, shake)
        change, rows = (after - self.after).flatten().double(), probes.flatten(1).double()
        least = tolerance_for(after.dtype) * rows.norm(dim=1) * self.after.double().norm()
        return bool(((rows @ change).abs() > least).any())


def _shaken(x: Tensor) -> Tensor:
    """The tensor with a tenth of random noise added."""
    return x + 0.1 * random_like(x)


def _same(one: Tensor, other: Tensor) -> bool:
    return relative_error(one, other) <= tolerance_for(other.dtype)
