"""Importing torch and transformers without garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Around the import of torch and transformers, whose modules live as long as the process.

    No garbage is collected meanwhile, and no later collection looks at what was imported; the last one, at the end of
    the process, is the longest.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
