"""Attributes with other values for a limited time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def holding(owner: object, **values: Any) -> Iterator[None]:
    """While active, the owner's attributes of these names have these values; afterwards their former ones."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
