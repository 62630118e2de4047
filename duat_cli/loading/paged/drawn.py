"""The weights of a model that transformers initialises, drawn page by page: the very values of the whole model.

While the model is built without memory, every draw is made once on a tensor that is dropped at once, and written down
with the state of the generator in front of it. A page is filled by doing what was written down for its parameters
again. (The idea is torchdistx' deferred initialisation, which keeps no states and so draws other values.)
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from duat_cli.compat.torch import operations_through, parameters_of
from duat_cli.compat.transformers import eager_model, initialisers_through
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.paged.layout import layout
from duat_cli.loading.paged.pager import Pager
from duat_cli.text import listed

_OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_"})  # nothing of what was there is left
_SMALL = 1 << 20  # values of a parameter that are kept as its constructor made them


@dataclass(frozen=True)
class _Step:
    """One change of a parameter in place."""

    function: Any
    args: tuple[Any, ...]  # behind the tensor itself
    kwargs: dict[str, Any]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    state: Tensor | None  # of the generator in front of a draw

    def again(self, whole: Tensor) -> None:
        part = whole.as_strided(self.size, self.stride, self.offset)
        args = [value.again() if isinstance(value, _Made) else value for value in self.args]
        if self.state is None:
            self.function(part, *args, **self.kwargs)
            return
        generator = torch.Generator()
        generator.set_state(self.state)
        self.function(part, *args, **{**self.kwargs, "generator": generator})


@dataclass(frozen=True)
class _Made:
    """A tensor on `meta`, and the steps that make it."""

    like: Tensor
    steps: Sequence[_Step]

    @torch.no_grad()
    def again(self) -> Tensor:
        found = torch.empty_like(self.like, device="cpu")
        for step in self.steps:
            step.again(found)
        return found


class _Recorder:
    """Writes down what changes tensors on `meta`, by their storage."""

    def __init__(self) -> None:
        self.steps: dict[Any, list[_Step]] = {}
        self.lost: set[Any] = set()  # storages that were given values which no step makes

    def _operate(self, function: Any, args: Any, kwargs: Any) -> Any:
        """One of torch's operations."""
        name = function.overloadpacket.__name__
        if name.endswith("_") and isinstance(args[0], Tensor) and args[0].is_meta:
            draws = torch.Tag.nondeterministic_seeded in function.tags
            self._write(args[0], function, args[1:], kwargs, draws=draws, whole=name in _OVERWRITES)
        found = function(*args, **kwargs)
        if name == "_to_copy" and found.is_meta and found.numel() <= _SMALL:
            self._write(found, torch.ops.aten.copy_.default, (args[0],), {}, draws=False, whole=True)
        elif name == "constant_pad_nd" and found.is_meta and found.shape == args[0].shape:  # as tied biases are padded
            self.steps[found.untyped_storage()] = [*self.steps.get(args[0].untyped_storage(), [])]
        return found

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While active, `steps` is written."""
        with initialisers_through(self._initialise), operations_through(self._operate):
            yield

    def _initialise(self, function: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One of torch's functions: as a whole, because on `meta` some draw nothing, or not as often."""
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
        """whole: whether nothing is left of what the tensor held."""
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
        steps.append(_Step(function, kept, kwargs, *view, state))

    def _kept(self, value: Tensor) -> Tensor | _Made:
        """What a step has to keep of a tensor that it reads; KeyError where no step made it."""
        if not value.is_meta:
            return value.clone()
        storage = value.untyped_storage()
        if storage in self.lost or value.numel() * value.element_size() != storage.nbytes():
            raise KeyError
        return _Made(value, tuple(self.steps[storage]))


class Drawn:
    """Draws parameters of a model on `meta` as transformers' initialisation would have."""

    bytes_read = 0  # of files

    def __init__(self, model: nn.Module, recorded: _Recorder) -> None:
        held = {name: (p, p.untyped_storage()) for name, p in model.named_parameters()}
        lost = [name for name, (_, own) in held.items() if own in recorded.lost or not recorded.steps.get(own)]
        if lost:
            raise UnsupportedModelError(
                f"{listed(lost)}: first values that are computed, not drawn, so the model cannot be initialised block "
                "by block"
            )
        self._made = {name: _Made(p, recorded.steps[own]) for name, (p, own) in held.items()}

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These parameters, whole, on the CPU."""
        return {name: self._made[name].again() for name in names}

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix, (rows, columns)."""
        return self._made[name].again()[list(rows)]


def untrained_model(cls: type[PreTrainedModel], config: Any, dtype: torch.dtype, device: str) -> tuple[Any, Pager]:
    """A model with transformers' own initialisation, of which one page at a time is in memory, and its pager.

    The generators' states decide what is drawn. UnsupportedModelError names a parameter that cannot be drawn alone.
    """
    recorded = _Recorder()
    with init_empty_weights(include_buffers=False), recorded.recording():
        model = eager_model(cls, config, dtype)
    model.requires_grad_(False)
    model.eval()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    drawn = Drawn(model, recorded)
    pages = layout(model, {name: (name, True) for name, _ in model.named_parameters()})
    return model, Pager(model, pages, drawn, dtype=dtype, device=device, see=lambda name, value: (), load=_put)


def _put(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> None:
    """The parameters where they belong."""
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        parameters_of(model.get_submodule(module))[leaf] = nn.Parameter(tensor.to(device), requires_grad=False)
