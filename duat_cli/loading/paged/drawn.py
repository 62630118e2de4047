"""The weights of a model that transformers initialises, drawn page by page with exactly the values of the whole model.

While the model is built without memory, every draw is made once on a temporary tensor, and recorded with the state of
the generator in front of it. A page is filled by repeating the steps recorded for its parameters. (The idea is
torchdistx' deferred initialisation, which keeps no states and so draws other values.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from duat_cli.compat.torch import parameters_of
from duat_cli.compat.transformers import eager_model
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.paged.layout import layout
from duat_cli.loading.paged.pager import Pager
from duat_cli.loading.paged.recorder import Made, Recorder
from duat_cli.text import listed


class Drawn:
    """Draws the parameters of a model on `meta` as transformers' initialisation would."""

    bytes_read = 0  # no file is read

    def __init__(self, model: nn.Module, recorded: Recorder) -> None:
        held = {name: (p, p.untyped_storage()) for name, p in model.named_parameters()}
        lost = [name for name, (_, own) in held.items() if own in recorded.lost or not recorded.steps.get(own)]
        if lost:
            raise UnsupportedModelError(
                f"{listed(lost)}: first values that are computed, not drawn, so the model cannot be initialised block "
                "by block"
            )
        self._made = {name: Made(p, recorded.steps[own]) for name, (p, own) in held.items()}

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The whole parameters, on the CPU."""
        return {name: self._made[name].again() for name in names}

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix, (rows, columns)."""
        return self._made[name].again()[list(rows)]


def untrained_model(cls: type[PreTrainedModel], config: Any, dtype: torch.dtype, device: str) -> tuple[Any, Pager]:
    """A model with transformers' own initialisation, with one page in memory at a time, and its pager.

    The states of the generators decide what is drawn. UnsupportedModelError names a parameter that cannot be drawn
    alone.
    """
    recorded = Recorder()
    with init_empty_weights(include_buffers=False), recorded.recording():
        model = eager_model(cls, config, dtype)
    model.requires_grad_(False)
    model.eval()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    drawn = Drawn(model, recorded)
    pages = layout(model, {name: (name, True) for name, _ in model.named_parameters()})
    # drawn values take as much memory as weights in use, unlike weights stored in half precision: reading ahead would
    # put two blocks in memory, more than is planned
    return model, Pager(
        model, pages, drawn, dtype=dtype, device=device, see=lambda name, value: (), load=_put, ahead=False
    )


def _put(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> None:
    """Puts the parameters in their places in the model."""
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        parameters_of(model.get_submodule(module))[leaf] = nn.Parameter(tensor.to(device), requires_grad=False)
