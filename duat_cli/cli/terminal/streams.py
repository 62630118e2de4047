"""Standard streams that survive being closed, full, narrow in encoding, or read by a pipe that ends early."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

from duat_cli.errors import InputError

_READER_GONE = {errno.EPIPE, errno.ESHUTDOWN, *([errno.EINVAL] if sys.platform == "win32" else [])}


def prepare() -> None:
    """Opens the null device for closed standard streams, and escapes characters that the encoding lacks.

    Otherwise the first opened file would get a closed standard stream's number, and a library that writes to descriptor
    1 would write into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write_result(text: str) -> None:
    """Writes to standard output. A reader that has gone away is ignored; a full device is an error.

    A document (HTML, XML) declares itself UTF-8, and is written so whatever the stream's encoding.
    """
    try:
        if text.startswith("<") and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        discard_output()
        if not is_broken_pipe(error):
            raise InputError(f"standard output: cannot write: {error.strerror or error}") from error


def say(text: str) -> None:
    """Writes a line to standard error; failure to write it is ignored."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
    settle_talk()


def settle_talk() -> None:
    """Flushes standard error. What it cannot take is discarded, as the interpreter would otherwise exit with 120."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        _discard(sys.stderr)


def discard_output() -> None:
    """Discards what is still buffered for standard output, so that the interpreter exits quietly."""
    _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def is_broken_pipe(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, means that the reader closed its end."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _READER_GONE:
            return True
        error = error.__cause__ or error.__context__
    return False


def boxes() -> bool:
    """Whether standard output can show box characters."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return encoding.startswith("utf")
