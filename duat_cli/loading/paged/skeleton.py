"""A model without weights: modules, shapes and tied places as transformers makes them, buffers that it computes."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from duat_cli.compat.torch import buffers_of, unsaved_buffers
from duat_cli.compat.transformers import eager_model


def fill_buffers(model: PreTrainedModel, cls: type[PreTrainedModel], config: PreTrainedConfig, device: Any) -> None:
    """Give a model on `meta` the buffers that no checkpoint holds, such as rotary frequencies.

    They come from a second model, built with parameters on `meta` alone: accelerate's `init_empty_weights`. Its hooks
    for offloaded weights are not used: they open the file anew for every tensor and hand out `meta` weights to others.
    """
    with torch.device(device), init_empty_weights(include_buffers=False):
        other: nn.Module = eager_model(cls, config, model.dtype)
    for path, module in other.named_modules():
        mine = buffers_of(model.get_submodule(path))
        mine.update({name: buffers_of(module)[name] for name in unsaved_buffers(module)})
