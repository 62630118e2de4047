"""Overrides of single layers in config.json: `per_layer_config` (transformers from 5.14 on)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duat_cli.loading.checkpoint.sizes import text_config

PER_LAYER = "per_layer_config"
SKIP = "skip"


@dataclass(frozen=True)
class Override:
    """One field of one layer, which is declared to differ from the config's own."""

    layer: int
    field: str
    """Name of the field; `skip` lists parts of the layer that are not to run."""
    value: Any
    ignored: bool | None = None
    """Whether the model is the same without the override; None where that could not be tried, for the reason in
    `why`."""
    why: str = ""


def overrides(config: dict[str, Any]) -> list[Override]:
    """The overrides that the config declares, except those that repeat the config's own value or skip nothing."""
    text = text_config(config)
    declared = text.get(PER_LAYER)
    if not isinstance(declared, Mapping):
        return []
    found = []
    for layer, fields in declared.items():
        if not str(layer).isdecimal() or not isinstance(fields, Mapping):
            continue
        for name, value in fields.items():
            if value == text.get(name) or (name == SKIP and not value):
                continue
            found.append(Override(int(layer), str(name), value))
    return found
