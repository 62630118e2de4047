"""Which way round layers keep their weights, where a shape does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from duat_cli.loading.checkpoint.files import fail
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.text import shown


def inputs_first(tensors: Mapping[str, TensorEntry]) -> dict[str | None, set[bool]]:
    """Stack of blocks -> whether its weights are stored as (in, out): what each layer says whose bias tells which side
    is out."""
    found: dict[str | None, set[bool]] = {}
    for name, entry in tensors.items():
        bias = tensors.get(name.removesuffix("weight") + "bias") if name.endswith(".weight") else None
        if bias is not None and len(entry.shape) == 2 and entry.shape[0] != entry.shape[1]:
            found.setdefault(stack_of(name), set()).add(bias.shape[:1] == entry.shape[1:])
    return found


def stack_of(name: str) -> str | None:
    """The part of a name in front of its first number: blocks are compared with each other, whatever the prefix is."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return None if not at else parts[at - 1]


def rows_are_outputs(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Quantised weights that are stored as (out, in), whichever way round their layers keep them."""
    return [name for name, entry in tensors.items() if entry.made is not None and entry.made.formula.outs_first]


def refuse_turned(path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """CheckpointError where the layers beside such a weight are stored as (in, out)."""
    rows = rows_are_outputs(tensors)
    beside = inputs_first({name: entry for name, entry in tensors.items() if entry.made is None}) if rows else {}
    for name in rows:
        if beside.get(stack_of(name)) == {True}:
            turned(path, name, tensors[name], "the layers beside it keep theirs")


def turned(path: Path, name: str, entry: TensorEntry, keeper: str) -> NoReturn:
    """keeper: who keeps its weights the other way round."""
    fail(path / entry.shard, f"{shown(name)}: quantised as (out, in), but {keeper} as (in, out): such layers are not "
                             "supported; give the checkpoint in full precision")  # fmt: skip
