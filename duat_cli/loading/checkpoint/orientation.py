"""Orientation of stored weights, (in, out) or (out, in), where a shape does not show it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from duat_cli.loading.checkpoint.files import fail
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.text import shown


def inputs_first(tensors: Mapping[str, TensorEntry]) -> dict[str | None, set[bool]]:
    """Stack of blocks -> whether its weights are stored as (in, out). Each layer that has a bias and is not square
    shows it: the bias has the size of the out side."""
    found: dict[str | None, set[bool]] = {}
    for name, entry in tensors.items():
        bias = tensors.get(name.removesuffix("weight") + "bias") if name.endswith(".weight") else None
        if bias is not None and len(entry.shape) == 2 and entry.shape[0] != entry.shape[1]:
            found.setdefault(stack_of(name), set()).add(bias.shape[:1] == entry.shape[1:])
    return found


def stack_of(name: str) -> str | None:
    """The last part of a name in front of its first number, so that blocks are compared with each other under any
    prefix."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return None if not at else parts[at - 1]


def rows_are_outputs(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Quantised weights that are stored as (out, in), in whichever orientation their layers keep them."""
    return [name for name, entry in tensors.items() if entry.made is not None and entry.made.formula.outs_first]


def refuse_turned(path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """CheckpointError for a quantised weight stored as (out, in) among layers that are stored as (in, out)."""
    rows = rows_are_outputs(tensors)
    beside = inputs_first({name: entry for name, entry in tensors.items() if entry.made is None}) if rows else {}
    for name in rows:
        if beside.get(stack_of(name)) == {True}:
            turned(path, name, tensors[name], "the layers beside it keep theirs")


def turned(path: Path, name: str, entry: TensorEntry, keeper: str) -> NoReturn:
    """Refuses the tensor. keeper: whose weights have the other orientation."""
    fail(path / entry.shard, f"{shown(name)}: quantised as (out, in), but {keeper} as (in, out): such layers are not "
                             "supported; give the checkpoint in full precision")  # fmt: skip
