"""The rule by which configs are made tiny, and its exceptions: configs/tiny.json."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any

import pydantic


class TypeException(pydantic.BaseModel):
    """An exception to the shrinking rule for one model type."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    why: str
    """What the rule alone would break."""
    set: dict[str, Any] = {}
    """Config field -> value, instead of the rule's."""
    undeclared: dict[str, Any] = {}
    """Fields that the model's code reads and its config class does not declare; a checkpoint's config.json states
    them."""


class Rule(pydantic.BaseModel):
    """configs/tiny.json."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    fields: dict[str, int | float]
    """Config field (or glob) -> small value; an exact name takes precedence over a glob."""
    lists: dict[str, list[int]]
    """Config field that holds a list -> value, so that both kinds of layers occur."""
    ids: dict[str, int]
    """Special tokens with a fixed id; every other special token is numbered after them."""
    types: dict[str, TypeException]
    tied: dict[str, int | float]
    """Further fields, for types that the others alone do not make run."""


@functools.cache
def rule() -> Rule:
    text = (importlib.resources.files("duat_cli.configs") / "tiny.json").read_text(encoding="utf-8")
    return Rule.model_validate_json(text)
