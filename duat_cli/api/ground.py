"""What stands around every call of the API: nothing is printed, and nothing of the process stays changed."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

from duat_cli.analysis.progress import Progress

_LOGGERS = ("transformers", "huggingface_hub")


def silent(done: int, total: int, what: str) -> None:
    """The progress of a call that was given none."""


def heard(progress: Progress | None) -> Progress:
    """The caller's progress, or none."""
    return progress or silent


def load_libraries() -> None:
    """torch and transformers, before anything runs: where they are imported already, the garbage collector is left
    alone, which a command stops for their import."""
    import duat_cli.loading.model.load  # noqa: F401


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Other libraries' warnings and logs stay away, and gradients can be taken, whatever mode the caller is in.

    Afterwards filters, levels and modes are as they were.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, _LOGGERS):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        torch = sys.modules.get("torch")
        undo.callback(_convolutions, torch is None or torch.backends.cudnn.allow_tf32)
        if torch is not None:
            undo.enter_context(torch.inference_mode(False))
            undo.enter_context(torch.enable_grad())
        yield


def _convolutions(short: bool) -> None:
    """Whether cuDNN's may drop digits, as they may by default; loading a model onto a GPU forbids it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.backends.cudnn.allow_tf32 = short
