"""Cutting of parts out of layers: key and value heads of every attention with the heads that use them, neurons of FFNs.

Everything happens in place, on the loaded model, inside context managers, as in models/edits/surgery.py.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from duat_cli.compat.torch import parameters_of, standing_in
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.holding import holding

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Slice:
    """One parameter in which every part has the same number of rows along an axis."""

    module: nn.Module
    name: str
    axis: int


@dataclass(frozen=True)
class Layers:
    """The parameters of one attention, or of one FFN, in which its parts have rows."""

    uneven: ClassVar[str]
    """The error text where several of them have, or would have, different numbers of parts."""
    count: int
    """Number of parts."""
    size: int
    """Number of terms that belong to a part: the heads that share a key and value head; one neuron."""
    slices: Mapping[Slice, Tensor]
    """The rows of each part in each parameter, (rows per part, parts)."""

    @property
    def each(self) -> int:
        """Number of parameters that are removed with one part."""
        return sum(held(one).numel() // held(one).shape[one.axis] * len(rows) for one, rows in self.slices.items())

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that a config states once for all layers."""
        return self.count, self.size

    def config(self, model: Any, shapes: Shapes, gone: int) -> Any:
        """A copy of the model's config with `gone` parts fewer, from which every tensor is built as in `shapes`.

        Raises UnsupportedModelError where there is none.
        """
        raise NotImplementedError


Cuts = Sequence[tuple[Layers, Sequence[int]]]
"""Layers of one kind, each with the numbers of the parts that it loses."""


@contextlib.contextmanager
def without_parts(model: Any, cuts: Cuts) -> Iterator[None]:
    """While active, the model is without these parts, the same number in each of the layers; afterwards as it was.

    The code that runs attention still counts the heads as before, so without heads the layers can only be saved.
    Raises UnsupportedModelError where a parameter is to lose rows twice.
    """
    first, count = cuts[0][0], _common(cuts)
    gone = [(one, rows[:, list(numbers)].flatten()) for layers, numbers in cuts for one, rows in layers.slices.items()]
    if len({one for one, _ in gone}) < len(gone):
        raise UnsupportedModelError("blocks share their weights")
    with contextlib.ExitStack() as stack:
        for one, places in gone:
            parameter = held(one)
            stays = torch.ones(parameter.shape[one.axis], dtype=torch.bool)
            stays[places] = False
            rest = parameter.detach().index_select(one.axis, stays.nonzero()[:, 0].to(parameter.device))
            stack.enter_context(standing_in(one.module, one.name, nn.Parameter(rest, requires_grad=False)))
        stack.enter_context(holding(model, config=first.config(model, shapes_of(model), count)))
        yield


def require_plain(module: nn.Module) -> None:
    """Raises UnsupportedModelError where a parametrization, such as weight_norm, makes a weight of other parameters."""
    for place, one in module.named_modules():
        if is_parametrized(one):
            name = ".".join(filter(None, (place, *list(one.parametrizations)[:1])))
            raise UnsupportedModelError(
                f"{name} is made of other parameters by a parametrization, and cannot leave a file; "
                "torch.nn.utils.parametrize.remove_parametrizations makes it a weight of its own"
            )


def require_stated(model: Any, every: Sequence[Layers]) -> None:
    """Raises UnsupportedModelError where no config states one part less in all of these layers."""
    _common([(layers, [0]) for layers in every])
    gone = [(one, len(rows)) for layers in every for one, rows in layers.slices.items()]
    every[0].config(model, _shapes_without(model, gone), 1)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by its name."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def is_built(model: Any, config: Any, shapes: Shapes) -> bool:
    """Whether the model's class builds every tensor in these shapes from a config, which any code may refuse."""
    with contextlib.suppress(Exception), torch.device("meta"):
        return shapes_of(type(model)(config)) == dict(shapes)
    return False


def is_stated(model: Any) -> bool:
    """Whether the model's own config builds it with its present shapes."""
    return is_built(model, model.config, shapes_of(model))


def held(one: Slice) -> nn.Parameter:
    """What stands there now."""
    return needed(parameters_of(one.module)[one.name])


def _shapes_without(model: Any, gone: Sequence[tuple[Slice, int]]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model without so many rows of these slices. A parameter may have more names."""
    shapes, names = shapes_of(model), defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for one, count in gone:
        for name in names[held(one)]:
            if name in shapes:
                size = list(shapes[name])
                size[one.axis] -= count
                shapes[name] = tuple(size)
    return shapes


def _common(cuts: Cuts) -> int:
    """The number of parts that each of the layers loses. Raises UnsupportedModelError if it differs, or is all."""
    first, count = cuts[0][0], len(set(cuts[0][1]))
    alike = all((one.numbers, len(set(numbers))) == (first.numbers, count) for one, numbers in cuts)
    if not alike or count >= first.count:
        raise UnsupportedModelError(first.uneven)
    return count
