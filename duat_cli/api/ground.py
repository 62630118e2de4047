"""Surroundings of every call of the API: nothing is printed, and the state of the process is restored."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import warnings
from collections.abc import Iterator

from duat_cli.analysis.progress import Progress
from duat_cli.errors import InputError

_ONE_AT_A_TIME = threading.RLock()
_LOGGERS = ("transformers", "huggingface_hub")


def silent(done: int, total: int, what: str) -> None:
    """Progress function of a call that was given none; does nothing."""


def heard(progress: Progress | None) -> Progress:
    """The caller's progress function, or a silent one. Raises InputError for an argument that cannot be called."""
    if progress is not None and not callable(progress):
        raise InputError(f"progress: expected a function of (done, total, what is done), got {type(progress).__name__}")
    return progress or silent


def load_libraries() -> None:
    """Imports torch and transformers before anything runs, so that `uncollected`, by which a command stops the garbage
    collector for this import, leaves the collector alone."""
    import duat_cli.loading.model.load  # noqa: F401


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context without other libraries' warnings and logs, in which gradients can be taken, and numbers have the dtype
    and the device of the model, whatever mode the caller is in.

    Afterwards filters, levels, modes and random states, which a model's own code may draw from, are restored. They
    belong to the process, so calls from several threads wait for each other.
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, _LOGGERS):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        undo.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            undo.callback(numpy.random.set_state, numpy.random.get_state())
        torch = sys.modules.get("torch")
        undo.callback(_convolutions, torch is None or torch.backends.cudnn.allow_tf32)
        if torch is not None:
            undo.enter_context(torch.inference_mode(False))
            undo.enter_context(torch.enable_grad())
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            undo.enter_context(torch.random.fork_rng(devices))
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)  # also that of random probes, which would otherwise differ
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    undo.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device().type != "cpu":
                undo.enter_context(torch.device("cpu"))
        yield


def _convolutions(short: bool) -> None:
    """Sets whether cuDNN's convolutions may use TF32, as they do by default; loading a model onto a GPU forbids it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.backends.cudnn.allow_tf32 = short
