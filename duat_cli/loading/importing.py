"""Importing torch and transformers without garbage collection."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

LAST = "duat_cli.loading.model.load"  # imports torch and transformers


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Around the import of torch and transformers, whose modules live as long as the process.

    No garbage is collected meanwhile, and no later collection looks at what was imported; the last one, at the end of
    the process, is the longest.
    """
    if LAST in sys.modules:  # nothing is left to import, and what is frozen is never collected
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
