"""Several streams a token (hyper-connections): the code of a block that weighs them, with its weights held.

A block of such a model reads a weighted sum of the streams, and adds its output to each with a weight. The weights are
made of the streams by squashing functions, in modules or in the block's own forward. They depend on the input as H does
and are held as it is; what is left mixes the streams of each token, channel by channel, and is linear.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from duat_cli.compat.torch import functions_unwatched
from duat_cli.models.arrays import random_like, relative_error, tolerance_for, wide
from duat_cli.models.block.norms import FrozenNorm, NormForm, freeze
from duat_cli.models.instrument.calls import only_tensor, tensors_in
from duat_cli.models.instrument.hooks import Forward, patched
from duat_cli.models.instrument.interception import GATES, SOFTMAX
from duat_cli.models.instrument.tracing import Event


class WeightFreezer(TorchFunctionMode):
    """Watches the squashing functions of a block that make the weights of its streams.

    Without `held`, every output is appended to `values`. With it, they are returned in order for any input, once for
    each item. apart: whether what runs now is left alone, as attention and FFNs are.
    """

    def __init__(self, values: list[Tensor], *, held: bool, apart: Callable[[], bool]) -> None:
        super().__init__()
        self._values, self._held, self._apart, self._calls = values, held, apart, itertools.count()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func not in GATES and func not in SOFTMAX) or self._apart():
            return func(*args, **kwargs)
        if self._held:
            value, x = self._values[next(self._calls)], args[0] if args else kwargs["input"]
            return value.expand(len(x) // len(value), *value.shape).flatten(0, 1)  # items stand in front of prompts
        with functions_unwatched():  # one gate function may call another
            value = func(*args, **kwargs)
        self._values.append(value)
        return value


def weighs_streams(event: Event, norms: Mapping[nn.Module, NormForm]) -> bool:
    """Whether a module weighs the streams of a token: with what its squashing functions give held, and its norms at
    their scale, it gives several tensors of which some are constant, and each channel of the others is made of that
    channel of the streams alone."""
    if len([*tensors_in(event.output)]) < 2 or not event.tensors:
        return False
    x, weights, frozen = event.tensors[0], list[Tensor](), defaultdict[nn.Module, list[FrozenNorm]](list)

    def outputs(value: Tensor, *, held: bool) -> list[Tensor]:
        args = [value if a is x else a for a in event.args]
        kwargs = {k: value if v is x else v for k, v in event.kwargs.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for norm in event.module.modules():
                if norm in norms:
                    stack.enter_context(patched(norm, _held(norms[norm], frozen[norm], held=held)))
            stack.enter_context(WeightFreezer(weights, held=held, apart=lambda: False))
            return [wide(tensor) for _, tensor in tensors_in(event.module(*args, **kwargs))]

    try:
        outputs(x, held=False)
        if not weights:
            return False
        r = random_like(x)
        at = [outputs(z, held=True) for z in (torch.zeros_like(x), x, r, x + r)]
        moving = [place for place, (at_0, at_r) in enumerate(zip(at[0], at[2], strict=True)) if not at_0.equal(at_r)]
        width = min((at[0][place].shape[-1] for place in moving), default=1)
        if width == 1 or len(moving) == len(at[0]) or any(at[0][place].shape[-1] % width for place in moving):
            return False
        one = outputs(x + r * (torch.arange(x.shape[-1], device=x.device) % width == 0), held=True)
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    for place in moving:
        at_0, at_x, at_r, at_sum = (values[place] for values in at)
        others = (one[place] - at_x).unflatten(-1, (-1, width))[..., 1:]
        if others.any() or not relative_error(at_x + at_r - at_0, at_sum) <= tolerance_for(x.dtype):
            return False
    return True


def _held(form: NormForm, frozen: list[FrozenNorm], *, held: bool) -> Callable[..., Any]:
    """What runs in place of a norm: the norm itself, recorded, or, where held, what was recorded, in call order."""
    calls: Iterator[FrozenNorm] = iter(frozen)

    def instead(module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Tensor:
        x = only_tensor(module, args, kwargs)
        if held:
            return next(calls)(x)
        y: Tensor = original(*args, **kwargs)
        frozen.append(freeze(form, x, y))
        return y

    return instead
