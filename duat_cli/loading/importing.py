"""Importing torch and transformers without garbage collection."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator

LAST = "duat_cli.loading.model.load"  # imports torch and transformers


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context for the import of torch and transformers, whose modules live as long as the process.

    No garbage is collected meanwhile, and no later collection looks at what was imported; the last collection, at the
    end of the process, would take longest.
    """
    if LAST in sys.modules:  # nothing is left to import, and frozen objects are never collected
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(_collect_at_the_end)
        if enabled:
            gc.enable()


def _collect_at_the_end() -> None:
    """Unfreezes objects for triton: 3.9 and newer prints on standard error which of its objects outlive the process,
    and frozen ones do. Without triton (builds of torch for the CPU) nothing asks, and the process ends sooner."""
    if "triton" in sys.modules:
        gc.unfreeze()
