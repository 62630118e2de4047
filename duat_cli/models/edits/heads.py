"""The layers of one attention in which its key and value heads, each with the heads that use it, have rows."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.compat.torch import parameters_of
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.linears import applied_axis, has_matrix
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.edits.cutting import Layers, Shapes, Slice, held, is_built
from duat_cli.models.instrument.tracing import Trace

_COUNT = re.compile(r"head")
_WIDTH = re.compile(r"head_dim|head_size|kv_channels")


@dataclass(frozen=True)
class HeadLayers(Layers):
    """The layers of one attention, whose parts are the key and value heads."""

    uneven = "its attentions have, or would have, different numbers of heads"
    width: int
    """Width d of a head."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.count, self.size, self.width

    def config(self, model: Any, shapes: Shapes, gone: int) -> Any:
        """The config with fewer heads: the numbers of heads from which every tensor is built as in `shapes`."""
        now = {self.count * self.size: (self.count - gone) * self.size, self.count: self.count - gone}
        config = copy.deepcopy(model.config)
        text = config.get_text_config()
        for name, value in list(vars(text).items()):
            if _WIDTH.search(name):
                new = self.width if value is None else value
            elif _COUNT.search(name) and isinstance(value, int) and not isinstance(value, bool):
                new = now.get(value, value)
            else:
                continue
            with contextlib.suppress(Exception):  # a config may refuse any number
                setattr(text, name, new)
        if is_built(model, config, shapes):
            return config
        raise UnsupportedModelError(
            "no numbers of heads in its config give these shapes; its head width may follow them"
        )


def head_layers(parts: BlockParts, written: Trace) -> HeadLayers:
    """The layers of a block whose attention has one layer each for queries, keys, values and output.

    Raises UnsupportedModelError for any other attention.
    """
    calls = written.attention_of(parts.attention)
    if parts.cross is not None:
        raise UnsupportedModelError("its cross-attention has heads too, of which a config states the same number")
    if len(calls) != 1 or len(parts.attention) != 1 or parts.output_projection is None:
        raise UnsupportedModelError("its heads are not those of one attention with one output projection")
    groups, width, heads = calls[0].value.shape[1], calls[0].value.shape[-1], calls[0].output.shape[2]
    output, found = parts.output_projection.linear, dict[Slice, Tensor]()
    if heads % groups:
        raise UnsupportedModelError(f"{heads} heads share {groups} key and value heads unevenly")
    for module in {**dict.fromkeys(parts.modules_of(parts.attention[0])), output: None}:
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            axis = 0 if parameter.ndim == 1 else 1 - applied_axis(module) if has_matrix(module) else -1
            if module is output:  # its bias belongs to no head
                axis = applied_axis(module) if parameter.ndim == 2 else -1
            if axis >= 0 and parameter.shape[axis] in (heads * width, groups * width, heads):
                found[Slice(module, name, axis)] = _rows(parameter.shape[axis], groups)
    if sum(held(one).ndim == 2 for one in found) != 4:
        raise UnsupportedModelError("its queries, keys, values and output are not four layers with a part a head")
    return HeadLayers(groups, heads // groups, found, width)


@functools.cache  # equal for all blocks
def _rows(rows: int, parts: int) -> Tensor:
    """The rows of each part as in `Layers.slices`, where a part has consecutive ones."""
    return torch.arange(rows).reshape(parts, -1).T
