"""Several streams a token (hyper-connections): the code of a block that weighs them, with its weights held.

A block of such a model reads a weighted sum of the streams, and adds its output to each with a weight. The weights are
made of the streams by squashing functions, in modules or in the block's own forward. They depend on the input as H does
and are held as it is; what is left mixes the streams of each token, channel by channel, and is linear.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import DuatError
from duat_cli.models.arrays import random_like, relative_error, tolerance_for, wide
from duat_cli.models.block.norms import FrozenNorm, NormForm, freeze
from duat_cli.models.instrument.calls import only_tensor, tensors_in
from duat_cli.models.instrument.hooks import Forward, patched
from duat_cli.models.instrument.interception import WeightFreezer
from duat_cli.models.instrument.tracing import Event


def streams_weighed(event: Event, norms: Mapping[nn.Module, NormForm]) -> int:
    """How many streams of a token a module weighs; 0 where it weighs none.

    With what its squashing functions give held, and its norms at their scale, such a module gives several tensors of
    which some are constant, and each channel of the others is made of that channel of the streams alone. The streams
    stand on an axis of their own or side by side.
    """
    if len([*tensors_in(event.output)]) < 2 or not event.tensors:
        return 0
    x, r, outputs = event.tensors[0], random_like(event.tensors[0]), _Held(event, norms)
    try:
        if not outputs.record(x):
            return 0
        every = [outputs(z) for z in (torch.zeros_like(x), x, r, x + r)]
        moving = [values for values in zip(*every, strict=True) if not values[0].equal(values[2])]
        width = min((at_0.shape[-1] for at_0, *_ in moving), default=1)
        count = x[0, 0].numel() // width
        if width == 1 or count == 1 or len(moving) == len(every[0]):
            return 0
        if any(values[0].shape[-1] % width or not _affine(*values, within=tolerance_for(x.dtype)) for values in moving):
            return 0
        one = outputs(x + r * (torch.arange(x.shape[-1], device=x.device) % width == 0))
        moved = [after - before for before, after in zip(every[1], one, strict=True) if before.shape[-1] % width == 0]
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, DuatError):
        return 0
    return 0 if any(tensor.unflatten(-1, (-1, width))[..., 1:].any() for tensor in moved) else count


def _affine(at_0: Tensor, at_x: Tensor, at_r: Tensor, at_sum: Tensor, *, within: float) -> bool:
    return relative_error(at_x + at_r - at_0, at_sum) <= within


class _Held:
    """A module with what its squashing functions give held, and its norms at their scale."""

    def __init__(self, event: Event, norms: Mapping[nn.Module, NormForm]) -> None:
        """event: a call of it, whose first tensor is exchanged."""
        self._event, self._weights = event, list[Tensor]()
        self._norms = {norm: norms[norm] for norm in event.module.modules() if norm in norms}
        self._frozen = defaultdict[nn.Module, list[FrozenNorm]](list)

    def record(self, x: Tensor) -> bool:
        """Records what is held from then on; whether there are squashing functions."""
        self._run(x, held=False)
        return bool(self._weights)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Every tensor of the output, at least in float32."""
        return [wide(tensor) for _, tensor in tensors_in(self._run(x, held=True))]

    def _run(self, x: Tensor, *, held: bool) -> Any:
        calls = defaultdict[nn.Module, Iterator[int]](itertools.count)

        def norm(module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Tensor:
            z, frozen = only_tensor(module, args, kwargs), self._frozen[module]
            if held:
                return frozen[next(calls[module])](z)
            y: Tensor = original(*args, **kwargs)
            frozen.append(freeze(self._norms[module], z, y))
            return y

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for module in self._norms:
                stack.enter_context(patched(module, norm))
            stack.enter_context(WeightFreezer(self._weights, held=held, apart=lambda: False))
            return self._event.all_again(x)
