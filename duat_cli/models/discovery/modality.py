"""What a model reads: token ids, or images and sound, which have no form here yet."""

from __future__ import annotations

import inspect
from typing import Any

from duat_cli.errors import UnsupportedModelError

_KINDS = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}


def stack_of(model: Any) -> Any:
    """The part that is run: the encoder of an encoder-decoder, else the model without its head."""
    return model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model.base_model


def require_token_ids(model: Any) -> None:
    """Refuses a model whose forward pass takes no `input_ids`, naming what it takes instead."""
    stack = stack_of(model)
    name = str(getattr(stack, "main_input_name", "input_ids"))  # as the model's own class states it
    taken = inspect.signature(stack.forward).parameters
    if "input_ids" in taken or name not in taken:  # a forward pass of *args hides what it takes; running it will tell
        return
    kind = f" ({_KINDS[name]})" if name in _KINDS else ""
    raise UnsupportedModelError(
        f"{type(model).__name__} ({model.config.model_type}) takes `{name}`{kind}, no token ids; read today are models "
        "that take `input_ids`"
    )
