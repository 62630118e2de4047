"""Norms as affine maps: which modules are norms, and the affine map of each once its scale is frozen.

Recognition is by behaviour, not by name. A norm is a module for which a gain g, a bias β and a projection P
(identity, or removal of the mean) exist such that y_j = s_j (P x_j)∘g + β for every token j of a real input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, rounding, wide
from duat_cli.models.block.linears import applied

SIZES = (4.0, 4.0 * 2**10, 4.0 * 2**20)  # sizes of probes; at one of them the eps does not show
MOST_GROUPS = 16  # most groups of channels, each with a scale of its own, that a norm is tried for
CLOSEST = 14  # 16**-k with k < 14 times a vector of ones is tried on the way to zero


@dataclass(frozen=True)
class NormForm:
    """The parts of a norm that do not depend on the input."""

    centered: bool  # whether P removes the mean (LayerNorm); else it is the identity (RMSNorm)
    gain: Tensor  # broadcasts to (..., D); known up to a common factor, which the token scales absorb
    bias: Tensor | None  # broadcasts to (..., D); None: zero
    groups: int = 1  # groups of D / groups channels, each with a scale, and a mean, of its own (streams side by side)

    def centre(self, x: Tensor) -> Tensor:
        """P x."""
        return x - self.each(self.apart(x).mean(dim=-1)) if self.centered else x

    def apart(self, x: Tensor) -> Tensor:
        """The channels of x by group, (..., groups, D / groups)."""
        return x.unflatten(-1, (self.groups, -1))

    def each(self, scale: Tensor) -> Tensor:
        """One number a group, (..., groups), for each channel: broadcasts to (..., D)."""
        return scale if self.groups == 1 else scale.repeat_interleave(self.gain.shape[-1] // self.groups, dim=-1)

    def lengths(self, x: Tensor) -> Tensor:
        """The norm of each group of channels, (..., groups)."""
        return torch.linalg.vector_norm(self.apart(x), dim=-1)

    def project(self, x: Tensor) -> Tensor:
        """(P x) ∘ g."""
        return self.centre(x) * self.gain


@dataclass(frozen=True)
class FrozenNorm:
    """The map z ↦ s ∘ (P z) ∘ g + β with the scale s of one input."""

    form: NormForm
    scale: Tensor  # (..., groups)
    rest: Tensor | None = None  # added as well: the rounding of the model's own norm; None: left out

    def __call__(self, z: Tensor) -> Tensor:
        scaled = self.form.project(wide(z)) * self.form.each(self.scale)
        y = scaled if self.form.bias is None else scaled + self.form.bias
        return (y if self.rest is None else y + self.rest).to(z.dtype)


def freeze(form: NormForm, x: Tensor, y: Tensor) -> FrozenNorm:
    """The norm with its scale held at input `x`, whose output was `y`: s_j = ‖y_j - β‖ / ‖(P x_j) ∘ g‖."""
    target = wide(y) if form.bias is None else wide(y) - form.bias
    size = form.lengths(form.project(wide(x)))
    scale = form.lengths(target) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return FrozenNorm(form, scale)


def freeze_whole(form: NormForm, x: Tensor, y: Tensor) -> FrozenNorm:
    """As `freeze`, with the rounding of a norm that always computes in float32 added as a constant of this input.

    Only in float64: in narrower dtypes the run's own arithmetic rounds as much.
    """
    frozen = freeze(form, x, y)
    return replace(frozen, rest=y - frozen(x)) if x.dtype == torch.float64 else frozen


def with_zeros(frozen: FrozenNorm, x: Tensor, norm: Callable[[Tensor], Tensor]) -> FrozenNorm:
    """The frozen norm with a scale also for vectors whose P x is zero, such as the embedding of a padding token. There
    ‖y‖ / ‖P x‖ is 0 / 0, and the scale is that of vectors close to zero (of RMSNorm 1 / √eps).

    norm: the norm itself. Raises UnsupportedModelError where the scale has no limit at zero.
    """
    zero = frozen.scale == 0
    if not bool(zero.any()):
        return frozen
    close = (_mean_free(x) * 16.0**-power for power in range(1, CLOSEST))
    for farther, nearer in itertools.pairwise(freeze(frozen.form, z, norm(z)).scale for z in close):
        if relative_error(nearer, farther) <= _invariance(x):  # the remaining difference falls as 1 / 16²
            return replace(frozen, scale=torch.where(zero, nearer + (nearer - farther) / 255, frozen.scale))
    raise UnsupportedModelError("a norm whose input is the zero vector has no scale there")


def recognise(module: nn.Module, x: Tensor, y: Tensor) -> NormForm | None:
    """The form of `module` if it is a norm over its last axis, else None.

    x, y: a real input and output, both (..., D).
    """
    if x.shape != y.shape or x.shape[-1] < 2 or not x.is_floating_point() or type(module) is nn.Linear:
        return None
    found = _scaled_away(module, x, SIZES)
    if found is None:
        return None
    size, u, bias, at_u = found
    shifted = applied(module, size * (u + 1)) - bias
    centered = relative_error(shifted, at_u) <= _invariance(x)
    whole = NormForm(centered, _per_feature(at_u / u), _per_feature(bias) if bool(bias.any()) else None)
    large = size * random_like(u)  # a function that saturates, nearly linear at a small x, shows here
    pairs = ((x, y), (large, applied(module, large)))
    width = x.shape[-1]
    for groups in (n for n in range(1, min(MOST_GROUPS, width // 2) + 1) if width % n == 0):
        form = replace(whole, groups=groups)
        if all(relative_error(freeze(form, at, given)(at), given) <= rounding(x.dtype) for at, given in pairs):
            return form
    return None


def scale_invariant(module: nn.Module, x: Tensor) -> bool:
    """Whether the module's output is the same, and not only that at zero, at 4 u and 16 u, with u shaped as `x`."""
    return _scaled_away(module, x, SIZES[:1]) is not None


def _scaled_away(module: nn.Module, x: Tensor, sizes: Sequence[float]) -> tuple[float, Tensor, Tensor, Tensor] | None:
    """The first size a for which the module's output at a u and 4 a u is the same; u; the output at zero; and the
    output at a u less that at zero. None where there is no such size."""
    if not x.numel():
        return None
    u = _mean_free(x)
    try:
        bias = applied(module, torch.zeros_like(x))
        for size in sizes:
            near, far = applied(module, size * u) - bias, applied(module, 4 * size * u) - bias
            if not bool(near.any()) or relative_error(far, 4 * near) <= rounding(x.dtype):
                return None  # linear, or zero
            if relative_error(far, near) <= _invariance(x):
                return size, u, bias, near
    except (RuntimeError, TypeError, ValueError, LookupError):  # it takes more than one tensor
        pass
    return None


def _invariance(x: Tensor) -> float:
    """The tolerance for outputs at two sizes to be the same: because of a norm's eps they differ a little."""
    return 1e-3 + rounding(x.dtype)


def _mean_free(x: Tensor) -> Tensor:
    """A vector without zeros and with mean zero, repeated to the shape of `x`. Raises UnsupportedModelError for vectors
    of one element, of which there is none."""
    width = x.shape[-1]
    if width == 1:
        raise UnsupportedModelError("a norm over one element: what it leaves affine cannot be told")
    u = torch.ones(width, dtype=x.dtype, device=x.device)
    u[1::2] = -1.0
    if width % 2:
        u[0], u[-1] = 3.0, -2.0
    return u.expand(x.shape).clone()


def _per_feature(values: Tensor) -> Tensor:
    """The values with one entry on every leading axis along which nothing changes, so that another token count fits."""
    for axis in range(values.ndim - 1):
        first = values.narrow(axis, 0, 1)
        if torch.equal(values, first.expand_as(values)):
            values = first
    return values.clone()
