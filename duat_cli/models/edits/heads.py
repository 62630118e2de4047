"""Attention without some of its key and value heads, each with the query heads that use it: cut out of every layer.

Everything happens in place, on the loaded model, inside context managers, as in models/edits/surgery.py.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import parameters_of
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.linears import applied_axis, has_matrix
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.instrument.attention import AttentionCall

_COUNT = re.compile(r"head")
_WIDTH = re.compile(r"head_dim|head_size|kv_channels")


@dataclass(frozen=True)
class Slice:
    """One parameter in which every group of heads, or every neuron, has an equal part along an axis."""

    module: nn.Module
    name: str
    axis: int


@dataclass(frozen=True)
class HeadLayers:
    """The parameters of one attention that groups of heads have parts of."""

    heads: int
    groups: int
    """Key and value heads; heads / groups neighbours share each."""
    width: int
    """Of a head."""
    slices: tuple[Slice, ...]

    @property
    def each(self) -> int:
        """Parameters that leave with one group."""
        return sum(held(one).numel() for one in self.slices) // self.groups


def head_layers(parts: BlockParts, calls: Sequence[AttentionCall]) -> HeadLayers:
    """Of a block whose attention has one layer each for queries, keys, values and output.

    calls: of its attention. UnsupportedModelError where that is not so.
    """
    if len(calls) != 1 or len(parts.attention) != 1 or parts.output_projection is None:
        raise UnsupportedModelError("its heads are not those of one attention with one output projection")
    groups, width, heads = calls[0].value.shape[1], calls[0].value.shape[-1], calls[0].output.shape[2]
    output, found = parts.output_projection.linear, list[Slice]()
    if heads % groups:
        raise UnsupportedModelError(f"{heads} heads share {groups} key and value heads unevenly")
    for module in {**dict.fromkeys(parts.modules_of(parts.attention[0])), output: None}:
        for name, parameter in parameters_of(module).items():
            axis = (
                0
                if parameter is None or parameter.ndim == 1
                else 1 - applied_axis(module)
                if has_matrix(module)
                else -1
            )
            if parameter is None or axis < 0:
                continue
            if module is output:
                found += [Slice(module, name, applied_axis(module))] if parameter.ndim == 2 else []
            elif parameter.shape[axis] in (heads * width, groups * width, heads):
                found.append(Slice(module, name, axis))
    matrices = [one for one in found if held(one).ndim == 2]
    if len(matrices) != 4:
        raise UnsupportedModelError("its queries, keys, values and output are not four layers with a part a head")
    return HeadLayers(heads, groups, width, tuple(found))


@contextlib.contextmanager
def without_heads(model: Any, cuts: Sequence[tuple[HeadLayers, Sequence[int]]]) -> Iterator[None]:
    """The model without these groups of heads, as many of each attention; its layers and its config are as they were,
    afterwards. The layers are only fit to be saved: what runs attention still counts the heads as before."""
    first, count = cuts[0][0], _common(cuts)
    gone = []
    for layers, numbers in cuts:
        for one in layers.slices:
            each = torch.arange(held(one).shape[one.axis]).reshape(layers.groups, -1)
            gone.append((one, each[list(numbers)].flatten()))
    with without_places(model, gone, lambda shapes: config_with_heads(model, shapes, first, count)):
        yield


@contextlib.contextmanager
def without_places(
    model: Any, gone: Sequence[tuple[Slice, Tensor]], config_of: Callable[[dict[str, tuple[int, ...]]], Any]
) -> Iterator[None]:
    """The model without these places along the axes of its parameters, and with the config that is made of the shapes
    of what is left; as it was, afterwards. UnsupportedModelError where a parameter is to lose places twice."""
    if len({one for one, _ in gone}) < len(gone):
        raise UnsupportedModelError("blocks share their weights")
    config, kept = model.config, list[tuple[Slice, nn.Parameter]]()
    try:
        for one, places in gone:
            parameter = held(one)
            kept.append((one, parameter))
            stays = torch.ones(parameter.shape[one.axis], dtype=torch.bool)
            stays[places] = False
            rest = parameter.detach().index_select(one.axis, stays.nonzero()[:, 0].to(parameter.device))
            parameters_of(one.module)[one.name] = nn.Parameter(rest, requires_grad=False)
        model.config = config_of(shapes_of(model))
        yield
    finally:
        for one, parameter in kept:
            parameters_of(one.module)[one.name] = parameter
        model.config = config


def require_stated(model: Any, every: Sequence[HeadLayers]) -> None:
    """UnsupportedModelError where no config states one group less of every attention."""
    _common([(layers, [0]) for layers in every])
    gone = [(one, held(one).shape[one.axis] // layers.groups) for layers in every for one in layers.slices]
    config_with_heads(model, shapes_without(model, gone), every[0], 1)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a model, by its name."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def shapes_without(model: Any, gone: Sequence[tuple[Slice, int]]) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the model, were so many rows of these gone; a parameter may be named several times."""
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


def config_with_heads(model: Any, shapes: Mapping[str, tuple[int, ...]], layers: HeadLayers, gone: int) -> Any:
    """A copy of the config with fewer heads: the numbers of heads with which every shape comes out as in `shapes`."""
    share = layers.heads // layers.groups
    now = {layers.heads: layers.heads - gone * share, layers.groups: layers.groups - gone}
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if _WIDTH.search(name):
            new = layers.width if value is None else value
        elif _COUNT.search(name) and isinstance(value, int) and not isinstance(value, bool):
            new = now.get(value, value)
        else:
            continue
        with contextlib.suppress(Exception):  # a config may refuse any number
            setattr(text, name, new)
    with contextlib.suppress(Exception), torch.device("meta"):
        built = type(model)(config)
        if shapes_of(built) == dict(shapes):
            return config
    raise UnsupportedModelError("no numbers of heads in its config give these shapes; its head width may follow them")


def _common(cuts: Sequence[tuple[HeadLayers, Sequence[int]]]) -> int:
    counts = {(layers.heads, layers.groups, layers.width, len(set(numbers))) for layers, numbers in cuts}
    if len(counts) != 1 or max(counts)[3] >= max(counts)[1]:
        raise UnsupportedModelError("its attentions have, or would have, different numbers of heads")
    return max(counts)[3]


def held(one: Slice) -> nn.Parameter:
    """What stands there now."""
    parameter = parameters_of(one.module)[one.name]
    assert parameter is not None
    return parameter
