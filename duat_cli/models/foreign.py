"""Errors of a model's own code, told apart from errors of duat."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from duat_cli.errors import UnsupportedModelError, is_out_of_memory

_KINDS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


@contextlib.contextmanager
def model_code(name: str) -> Iterator[None]:
    """Turn an exception that the model's own code raises into an UnsupportedModelError with that cause.

    An exception raised in duat, or in torch called from duat, is duat's own fault and is not changed.
    """
    try:
        yield
    except _KINDS as fault:
        if is_out_of_memory(fault) or _raised_by_duat(fault):
            raise
        first_line = (str(fault).splitlines() or [""])[0]
        raise UnsupportedModelError(
            f"{name}: its own code could not be replayed: {type(fault).__name__}: {first_line}"
        ) from fault


def _raised_by_duat(fault: BaseException) -> bool:
    """Whether the innermost frame outside torch is one of this package."""
    for frame, _ in reversed(list(traceback.walk_tb(fault.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package != "torch":
            return package == "duat_cli"
    return False
