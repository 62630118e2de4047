"""Records the changes of tensors that are not in memory, and repeats them on tensors that are."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.compat.torch import operations_through
from duat_cli.compat.transformers import initialisers_through

_OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_"})  # they leave nothing of the old values
_SMALL = 1 << 20  # most values of a parameter that are kept as its constructor made them


@dataclass(frozen=True)
class Step:
    """One change of a parameter in place."""

    function: Any
    args: tuple[Any, ...]  # behind the tensor itself
    kwargs: dict[str, Any]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    state: Tensor | None  # state of the generator in front of a draw

    def again(self, whole: Tensor) -> None:
        if not whole.is_contiguous():  # as the tensor on `meta` was
            self.again(copy := whole.contiguous())
            whole.copy_(copy)
            return
        part = whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)
        args = [value.again() if isinstance(value, Made) else value for value in self.args]
        if self.state is None:
            self.function(part, *args, **self.kwargs)
            return
        generator = torch.Generator()
        generator.set_state(self.state)
        self.function(part, *args, **{**self.kwargs, "generator": generator})


@dataclass(frozen=True)
class Made:
    """A tensor on `meta`, and the steps that compute its values."""

    like: Tensor
    steps: Sequence[Step]

    def again(self) -> Tensor:
        found = torch.empty_like(self.like, device="cpu")
        again(self.steps, found)
        return found


@torch.no_grad()
def again(steps: Iterable[Step], tensor: Tensor) -> None:
    """Repeats these steps on a tensor."""
    for step in steps:
        step.again(tensor)


class Recorder:
    """Records the steps that change tensors on `meta`, by their storage."""

    def __init__(self) -> None:
        self.steps: dict[Any, list[Step]] = {}
        self.lost: set[Any] = set()  # storages with values that no step makes

    def _operate(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs one of torch's operations, and records it if it changes a tensor on `meta`."""
        name = function.overloadpacket.__name__
        if name.endswith("_") and isinstance(args[0], Tensor) and args[0].is_meta:
            draws = torch.Tag.nondeterministic_seeded in function.tags
            self._write(args[0], function, args[1:], kwargs, draws=draws, whole=name in _OVERWRITES)
        found = function(*args, **kwargs)
        if name == "_to_copy" and found.is_meta and found.numel() <= _SMALL:
            self._write(found, torch.ops.aten.copy_.default, (args[0],), {}, draws=False, whole=True)
        elif name == "scalar_tensor" and found.is_meta:  # a number that is set at a place
            self._write(found, torch.ops.aten.fill_.Scalar, args[:1], {}, draws=False, whole=True)
        elif name == "constant_pad_nd" and found.is_meta and found.shape == args[0].shape:  # as tied biases are padded
            self.steps[found.untyped_storage()] = [*self.steps.get(args[0].untyped_storage(), [])]
        return found

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which `steps` is recorded."""
        with initialisers_through(self._initialise), operations_through(self._operate):
            yield

    def _initialise(self, function: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Records one of torch's initialisation functions as a whole, because on `meta` some draw nothing, or less
        often."""
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        draws = "generator" in inspect.signature(function).parameters
        self._write(tensor, function, args, kwargs, draws=draws, whole=True)
        return tensor

    def _write(
        self,
        target: Tensor,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        draws: bool,
        whole: bool,
    ) -> None:
        """Records one step. whole: whether nothing is left of the tensor's old values."""
        storage, state = target.untyped_storage(), None
        if draws:
            state = torch.get_rng_state()
            function(torch.empty_like(target, device="cpu"), *args, **kwargs)  # the generator goes on as it would
        steps = self.steps.setdefault(storage, [])
        if whole and target.numel() * target.element_size() == storage.nbytes():
            steps.clear()
            self.lost.discard(storage)
        try:
            kept = tuple(self._kept(value) if isinstance(value, Tensor) else value for value in args)
        except KeyError:
            self.lost.add(storage)
            return
        view = tuple(target.shape), target.stride(), int(target.storage_offset())
        steps.append(Step(function, kept, kwargs, *view, state))

    def _kept(self, value: Tensor) -> Tensor | Made:
        """The values that a step must keep of a tensor that it reads; KeyError where no step made them."""
        if not value.is_meta:
            return value.clone()
        storage = value.untyped_storage()
        if storage in self.lost or value.numel() * value.element_size() != storage.nbytes():
            raise KeyError
        return Made(value, tuple(self.steps[storage]))
