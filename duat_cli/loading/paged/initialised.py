"""Effects of transformers' initialisation on a model whose weights are read: buffers that no file holds, and values
that it sets in spite of those read, such as the padding row of an embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from duat_cli.compat.torch import buffers_of, unsaved_buffers
from duat_cli.compat.transformers import eager_model, initialise_read
from duat_cli.errors import CheckpointError
from duat_cli.loading.paged.recorder import Recorder, Step
from duat_cli.text import listed


def initialise(
    model: PreTrainedModel, cls: type[PreTrainedModel], config: PreTrainedConfig, device: Any
) -> Mapping[str, Sequence[Step]]:
    """Gives a model on `meta` the buffers that no checkpoint holds, such as rotary frequencies. Returns the steps that
    change parameters and saved buffers after they are read, under each of their names.

    Both come from a second model, whose parameters alone are on `meta`: accelerate's `init_empty_weights`. accelerate's
    hooks for offloaded weights are not used, because they open the file anew for every tensor and show `meta` weights
    to others. CheckpointError names tensors whose new values depend on draws or on other tensors.
    """
    recorded = Recorder()
    with torch.device(device):
        with init_empty_weights(include_buffers=False):
            other: nn.Module = eager_model(cls, config, model.dtype)
        for path, module in other.named_modules():
            own = buffers_of(module)
            unsaved = {name: own.pop(name) for name in unsaved_buffers(module)}
            buffers_of(model.get_submodule(path)).update(unsaved)
            saved = {name: held.to("meta") for name, held in own.items() if held is not None}
            own.update({**saved, **unsaved})
        with recorded.recording():
            initialise_read(other)
    every = {**dict(other.named_parameters(remove_duplicate=False)), **dict(other.named_buffers())}
    storages = {name: tensor.untyped_storage() for name, tensor in every.items() if tensor.is_meta}
    steps = {name: recorded.steps.get(own, []) for name, own in storages.items()}
    drawn = {name for name, found in steps.items() if any(step.state is not None for step in found)}
    if lost := [name for name, own in storages.items() if own in recorded.lost or name in drawn]:
        raise CheckpointError(
            f"{listed(lost)}: drawn or computed by transformers once it has read the weights, so they cannot be read "
            "in parts"
        )
    return {name: found for name, found in steps.items() if found}
