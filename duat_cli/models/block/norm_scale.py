"""How a norm's scale answers to a change of its input: it matters where part of a branch in front of a norm goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, tolerance_for
from duat_cli.models.block.norms import NormForm, freeze


@dataclass(frozen=True)
class NormScale:
    """A norm's scale s at the input x: 1 / s² = slope ‖P x‖² + offset (of RMSNorm 1/M and eps, but for the gain's)."""

    form: NormForm
    slope: float
    offset: float

    def centered(self, x: Tensor) -> Tensor:
        """P x, float64."""
        x = x.double()
        return x - x.mean(dim=-1, keepdim=True) if self.form.centered else x

    def square(self, x: Tensor) -> Tensor:
        """‖P x‖² of every row, (…, M) to (…), float64."""
        return self.centered(x).square().sum(dim=-1)

    def ratio(self, before: Tensor, after: Tensor) -> Tensor:
        """By what the scale is multiplied when ‖P x‖² goes from `before` to `after`."""
        last = (self.offset + self.slope * after).clamp_min(torch.finfo(torch.float64).tiny)
        return ((self.offset + self.slope * before) / last).sqrt()


def norm_scale(norm: nn.Module, form: NormForm, x: Tensor) -> NormScale:
    """The scale of the norm around its input x, (…, M): fitted to two random vectors a token, checked on x."""
    like = random_like(x.reshape(1, -1, x.shape[-1]))
    probes = [like / 2, 2 * like, x.reshape(like.shape)]
    plain = NormScale(form, 0.0, 0.0)
    with torch.no_grad():
        inverse = [freeze(form, probe, norm(probe)).scale.double().flatten() ** -2 for probe in probes]
    squares = [plain.square(probe).flatten() for probe in probes]
    slope = float(((inverse[1] - inverse[0]) / (squares[1] - squares[0])).median())
    found = NormScale(form, slope, max(float((inverse[0] - slope * squares[0]).median()), 0.0))
    for square, expected in zip(squares, inverse, strict=True):
        if not relative_error(found.offset + found.slope * square, expected) <= tolerance_for(x.dtype):
            raise UnsupportedModelError("the scale of the norm on its branch does not follow the size of its input")
    return found
