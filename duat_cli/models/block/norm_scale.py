"""Norms at other inputs than their own: the change of their scale, needed where part of a branch in front is removed,
and the ball that holds their outputs for any input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, tolerance_for
from duat_cli.models.block.linears import applied, wide_twin
from duat_cli.models.block.norms import NormForm, freeze, recognise
from duat_cli.operators.bounds import Ball

SEED = 11
DIRECTIONS = 48
LENGTHS = (1e-2, 1.0, 1e2, 1e4)  # rms of the tokens tried; at the last one no eps shows
ALIKE = 1e-4  # how far radii of long tokens may differ
MARGIN = 1 + 3e-6  # the norm itself computes in float32


@dataclass(frozen=True)
class NormScale:
    """A norm's scale s at an input x: 1 / s² = slope ‖P x‖² + offset (RMSNorm: 1/M, eps, up to the gain's)."""

    form: NormForm
    slope: float
    offset: float

    def centered(self, x: Tensor) -> Tensor:
        """P x, float64."""
        return self.form.centre(x.double())

    def square(self, x: Tensor) -> Tensor:
        """‖P x‖² of every row, (…, M) to (…), float64."""
        return self.centered(x).square().sum(dim=-1)

    def ratio(self, before: Tensor, after: Tensor) -> Tensor:
        """The factor by which the scale changes when ‖P x‖² goes from `before` to `after`."""
        last = (self.offset + self.slope * after).clamp_min(torch.finfo(torch.float64).tiny)
        return ((self.offset + self.slope * before) / last).sqrt()


def norm_scale(norm: nn.Module, form: NormForm, x: Tensor) -> NormScale:
    """The scale of the norm around its input x, (…, M): fitted to two random vectors per token, checked on x. Raises
    UnsupportedModelError where the scale does not follow ‖P x‖."""
    if form.groups > 1:
        raise UnsupportedModelError(f"{type(norm).__name__} scales groups of channels apart")
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


def ball_of(norm: nn.Module, width: int) -> Ball:
    """The ball of a norm over vectors of that width. Raises UnsupportedModelError where its outputs lie in none.

    The radius is measured on long tokens of many directions, which must all give the same; shorter ones must not give
    more. The scale then depends on the length |P x| alone, and falls with it.
    """
    twin = wide_twin(norm)
    tokens = _directions(width).to(next(iter(twin.parameters()), torch.empty(0)))
    with torch.no_grad():
        try:
            form = recognise(twin, tokens, applied(twin, tokens))
        except (RuntimeError, LookupError):  # it takes another width, or only tensors of three axes
            form = None
        if form is None or form.groups > 1:
            raise UnsupportedModelError(f"{type(norm).__name__} is no norm whose output has a largest size")
        if form.gain.numel() != width or (form.bias is not None and form.bias.numel() != width):
            raise UnsupportedModelError(f"{type(norm).__name__}'s gain depends on the token")
        radii = [_radius(twin, form, tokens * length) for length in LENGTHS]
    top = float(radii[-1].max())
    if not float(radii[-1].min()) >= top * (1 - ALIKE) or not max(float(r.max()) for r in radii) <= top * (1 + ALIKE):
        raise UnsupportedModelError(f"{type(norm).__name__}'s scale depends on more than the token's length")
    return Ball(
        gain=form.gain.reshape(width).double(),
        bias=None if form.bias is None else form.bias.reshape(width).double(),
        centered=form.centered,
        radius=top * MARGIN,
    )


def _radius(norm: nn.Module, form: NormForm, x: Tensor) -> Tensor:
    """The length of u, s |P x|, for every token of x (n, M): (n,)."""
    frozen = freeze(form, x, applied(norm, x))
    return (frozen.scale * torch.linalg.vector_norm(form.centre(x), dim=-1, keepdim=True)).double()[:, 0]


def _directions(width: int) -> Tensor:
    """Tokens of rms 1: dense, sparse and in between, (DIRECTIONS, width)."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randn(DIRECTIONS, width, generator=generator)
    tokens[::3] = tokens[::3].pow(5)  # a few coordinates hold nearly all of the length
    tokens[::8] += 0.5  # with a mean
    return tokens / tokens.square().mean(dim=-1, keepdim=True).sqrt()
