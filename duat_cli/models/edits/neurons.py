"""The layers of one FFN in which its neurons have rows."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.compat.torch import parameters_of
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.linears import applied_axis
from duat_cli.models.edits.cutting import Layers, Shapes, Slice, is_built, require_plain
from duat_cli.models.terms.feedforward import FeedForward

_INNER_WIDTH = re.compile(r"inner|intermediate|ffn|d_ff|hidden_dim")


@dataclass(frozen=True)
class NeuronLayers(Layers):
    """The layers of one FFN, whose parts are the neurons; a layer that makes gate and up has two rows of each."""

    uneven = "its FFNs have, or would have, different widths, which its config cannot state"

    def config(self, model: Any, shapes: Shapes, gone: int) -> Any:
        """The config with narrower FFNs: the first number in it from which every tensor is built as in `shapes`."""
        try:
            values = vars(model.config.get_text_config())
        except ValueError as fault:
            raise UnsupportedModelError("its config has several text parts, which state a width each") from fault
        names = [n for n, v in values.items() if v == self.count and isinstance(v, int) and not isinstance(v, bool)]
        names += [n for n, v in values.items() if v is None and _INNER_WIDTH.search(n)]
        for name in names:
            config = copy.deepcopy(model.config)
            with contextlib.suppress(Exception):  # a number that means something else may be refused
                setattr(config.get_text_config(), name, self.count - gone)
                if is_built(model, config, shapes):
                    return config
        raise UnsupportedModelError("no number in its config states the width of its FFNs alone")


def neuron_layers(form: FeedForward) -> NeuronLayers:
    """The layers of an FFN of proved form. Raises UnsupportedModelError where a weight is made of other parameters."""
    for linear in (form.down, *form.linears):
        require_plain(linear)
    found: dict[Slice, list[Tensor]] = defaultdict(list)
    for rows in form.read:
        found[Slice(rows.linear, "weight", 1 - applied_axis(rows.linear))].append(rows.index)
        if parameters_of(rows.linear).get("bias") is not None:
            found[Slice(rows.linear, "bias", 0)].append(rows.index)
    found[Slice(form.down, "weight", applied_axis(form.down))].append(torch.arange(form.neurons))
    return NeuronLayers(form.neurons, 1, {one: torch.stack(each) for one, each in found.items()})
