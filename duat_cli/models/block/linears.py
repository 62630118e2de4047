"""The matrix and the bias that a linear layer applies, however its class stores them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import parameters_of, standing_in
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import gaussian, relative_error, rounding, tolerance_for, wide
from duat_cli.models.block.slots import parted

SEED = 5
PROBE_ROWS = 512


def has_matrix(module: nn.Module) -> bool:
    """Whether a module's weight is one matrix to multiply by."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def applied(module: nn.Module, x: Tensor) -> Tensor:
    """The module's output for `x`, or the first of a tuple (which may hold a scale as well)."""
    return parted(module(x))[0]


def matrix_of(linear: nn.Module, width: int) -> Tensor:
    """The (in, out) matrix that a layer applies, at least float32: its weight if a probe confirms it, else probed."""
    twin = wide_twin(linear)
    found = _confirmed(twin, rounding)
    return found[1] if found is not None and len(found[1]) == width else _probed(twin, width)


def stored_matrix(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """The (in, out) matrix of a layer's weight rounded to `dtype`, given in at least float32. Raises
    UnsupportedModelError if the layer applies another matrix."""
    return wide(_or_refused(linear, _confirmed(linear, tolerance_for, dtype))[1])


def applied_axis(linear: nn.Module) -> int:
    """The axis of a layer's weight that is its input. Raises UnsupportedModelError if it applies another matrix."""
    return _or_refused(linear, _confirmed(wide_twin(linear), rounding))[0]


def bias_of(linear: nn.Module, width: int) -> Tensor | None:
    """The layer's output for zero, (out,), at least float32; None where that is zero."""
    twin = wide_twin(linear)
    with torch.no_grad():
        at_zero = applied(twin, _zeros(twin, 1, width))[0, 0]
    return at_zero if bool(at_zero.any()) else None


def wide_twin(module: nn.Module) -> nn.Module:
    """The module itself, or a float32 copy of one in half precision, so that formulas can be told apart."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return module if dtypes <= {torch.float32, torch.float64} else copy.deepcopy(module).float()


def without_bias(layer: nn.Module) -> contextlib.AbstractContextManager[None]:
    """While active, a layer's or a norm's own bias is zero: next to a large bias the rest is lost in rounding."""
    bias = parameters_of(layer).get("bias")
    return contextlib.nullcontext() if bias is None else standing_in(layer, "bias", torch.zeros_like(bias))


def _or_refused(linear: nn.Module, found: tuple[int, Tensor] | None) -> tuple[int, Tensor]:
    if found is None:
        raise UnsupportedModelError(f"{type(linear).__name__}'s weight is not the matrix that it applies")
    return found


def _confirmed(
    layer: nn.Module, within: Callable[[torch.dtype], float], dtype: torch.dtype | None = None
) -> tuple[int, Tensor] | None:
    """The axis of a layer's weight that is its input features, and the weight as an (in, out) matrix.

    None if the layer's output for a random vector differs by a relative error of more than `within(dtype)`.
    """
    weight = layer.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        return None
    weight = weight.detach() if dtype is None else weight.detach().to(dtype)
    for axis, matrix in ((1, weight.T), (0, weight)):
        vector = gaussian((1, 2, len(matrix)), matrix, SEED)
        try:
            with torch.no_grad(), without_bias(layer):
                answer = applied(layer, vector) - applied(layer, torch.zeros_like(vector))
        except RuntimeError:
            continue
        expected = vector @ matrix
        if answer.shape == expected.shape and relative_error(expected, answer) <= within(matrix.dtype):
            return axis, matrix
    return None


def _probed(layer: nn.Module, width: int) -> Tensor:
    parts = []
    with torch.no_grad(), without_bias(layer):
        at_zero = applied(layer, _zeros(layer, 1, width))
        for first in range(0, width, PROBE_ROWS):
            count = min(PROBE_ROWS, width - first)
            unit = _zeros(layer, count, width)
            unit[0, torch.arange(count), first + torch.arange(count)] = 1.0
            parts.append((applied(layer, unit) - at_zero)[0])
    return torch.cat(parts)


def _zeros(layer: nn.Module, tokens: int, width: int) -> Tensor:
    parameter = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.zeros(1, tokens, width, dtype=parameter.dtype, device=parameter.device)
