"""Other libraries, kept quiet: their log is collected, and their exceptions and panics become duat's errors."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import TextIO

from duat_cli.compat.tokenizers import is_panic
from duat_cli.compat.transformers import is_load_report
from duat_cli.errors import CheckpointError, DuatError
from duat_cli.text import one_line

_LOG_LINES = 5


class _Collector(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def hushed() -> Iterator[list[str]]:
    """Collects the log of transformers and the hub, as raw text, instead of letting it reach the terminal.

    Their load report prints tensor names unescaped. Code that comes with a checkpoint may print as well, and standard
    output is for the result.
    """
    from transformers import logging as transformers_logging  # heavy, and loaded when this is needed

    lines: list[str] = []
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "accelerate")]
    saved = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.handlers, logger.propagate = [_Collector(lines)], False
        transformers_logging.disable_progress_bar()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield lines
    finally:
        for logger, handlers, propagate in saved:
            logger.handlers, logger.propagate = handlers, propagate
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def calling_tokenizer(what: str, kind: type[DuatError] = CheckpointError) -> Iterator[None]:
    """A context for code that may fail in Rust: it neither logs nor prints panics on the terminal, and its errors are
    duat's."""
    with silenced(), foreign_errors(what, kind):
        yield


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """A context as `calling_tokenizer`, around many calls that each name what fails."""
    with hushed(), _muted_panics():
        yield


@contextlib.contextmanager
def _muted_panics() -> Iterator[None]:
    """Sends descriptor 2 to the null device, because Rust prints its own lines about a panic there before it can be
    caught.

    Python's writes to sys.stderr meanwhile, such as the progress, go out through a copy of the descriptor.
    """
    python = sys.stderr
    with contextlib.ExitStack() as undo:
        try:
            copy = os.dup(2)
        except OSError:  # no standard error that needs to be kept clean
            yield
            return
        undo.callback(os.close, copy)
        with open(os.devnull, "wb") as null:
            undo.callback(os.dup2, copy, 2)
            os.dup2(null.fileno(), 2)
        undo.callback(setattr, sys, "stderr", python)
        if _descriptor(python) == 2:
            sys.stderr = _writer(copy, python)
        yield


def _descriptor(stream: TextIO | None) -> int | None:
    """The stream's file descriptor; None for a stream that is no file, as under a test's capture."""
    try:
        return stream.fileno() if stream is not None else None
    except (OSError, ValueError):
        return None


def _writer(descriptor: int, like: TextIO) -> TextIO:
    """A new stream to the same place; it closes itself when no thread uses it any more."""
    own = os.dup(descriptor)
    stream = open(own, "w", 1, encoding=like.encoding, errors=like.errors, closefd=False)  # noqa: SIM115
    weakref.finalize(stream, os.close, own)
    return stream


@contextlib.contextmanager
def foreign_errors(what: str, kind: type[DuatError] = CheckpointError) -> Iterator[None]:
    """A context in which another library's exception, or a panic of the Rust tokenizers, becomes one line of ours."""
    try:
        yield
    except DuatError:
        raise
    except BaseException as error:
        # a checkpoint's code that exits the process would pass for the command's own exit code
        if not isinstance(error, (Exception, SystemExit)) and not is_panic(error):
            raise
        raise kind(f"{what}: {described(error)}") from error


def described(error: BaseException) -> str:
    """An exception as a part of a line."""
    return one_line(f"{type(error).__name__}: {error}", 300)


def foreign_notes(log: list[str]) -> list[str]:
    """transformers' warnings, except its load report, whose content duat states itself."""
    lines = [one_line(f"transformers: {text}", 300) for text in log if not is_load_report(text)]
    return list(dict.fromkeys(lines))[:_LOG_LINES]
