"""What a class of models reads, by the arguments of its forward pass."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING

from duat_cli.compat.transformers import auto_models
from duat_cli.results.support import Modality
from duat_cli.zoo.tiny import class_of_config

_NAMED: dict[tuple[str, ...], Modality] = {
    ("text",): "text",
    ("vision",): "vision",
    ("audio",): "audio",
    ("text", "vision"): "vision-language",
    ("audio", "text"): "audio-language",
    ("audio", "vision"): "several",
    ("audio", "text", "vision"): "several",
}


def modality_of(cls: type[Any]) -> Modality:
    """Tokens of a decoder's own do not count: what a speech recogniser reads is sound."""
    taken = inspect.signature(cls.forward).parameters
    found = set()
    for name in taken:
        if name == "input_ids":
            found.add("text")
        elif "pixel" in name or "patches" in name or "grid_thw" in name:
            found.add("vision")
        elif name.startswith(("input_features", "input_values", "audio")):
            found.add("audio")
    return _NAMED.get(tuple(sorted(found)), "other")


def modality_of_type(model_type: str) -> Modality:
    """The same of a type's base model; 'other' where it has none."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        found = auto_models("BASE").get(config_class, None) or class_of_config(config_class)
        return modality_of(found[0] if isinstance(found, tuple) else found)
    except Exception:  # a class whose own libraries are not there
        return "other"
