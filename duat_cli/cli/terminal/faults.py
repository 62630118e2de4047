"""Description of an error that ends a command: the line for standard error, and its kind for programs."""

from __future__ import annotations

from typing import Literal

from duat_cli.cli.terminal.signals import Stopped
from duat_cli.compat.typer import usage_error
from duat_cli.errors import EXIT_UNDECIDED, CheckpointError, DuatError, UnsupportedModelError, is_out_of_memory
from duat_cli.text import one_line

Kind = Literal["input", "checkpoint", "unsupported", "memory", "stopped", "internal"]

_OF_ONE_MODEL = tuple(f"duat {name}" for name in ("inspect", "attribute", "compare", "matrix", "prune-bound", "verify"))


def line_of(error: BaseException) -> str:
    """The line of an error, with its notes. A usage error names the help page; a bug, any unexpected error, how to see
    a traceback."""
    if isinstance(error, DuatError):
        return "; ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, Stopped):
        return error.text
    usage = usage_error(error)
    if usage is not None:
        message, command = usage
        if message.startswith("Got unexpected extra argument") and command in _OF_ONE_MODEL:
            message += f": {command} reads one model; two are compared by duat lora-diff BASE TUNED"
        return f"{message.replace('Value error, ', '')} (help: {command or 'duat'} --help)"
    if is_out_of_memory(error):
        said = one_line(str(error), 120)
        detail = f" ({said})" if said else ""
        return f"out of memory{detail}; use shorter prompts (--max-tokens), or read weights block by block (--memory)"
    text = one_line(f"{type(error).__name__}: {error}", 200).rstrip(": ")
    return f"unexpected {text} (set DUAT_DEBUG=1 for the traceback)"


def kind_of(error: BaseException) -> Kind:
    if isinstance(error, Stopped):
        return "stopped"
    if isinstance(error, CheckpointError):
        return "checkpoint"
    if isinstance(error, UnsupportedModelError):
        return "unsupported"
    if isinstance(error, DuatError) or usage_error(error) is not None:
        return "input"
    return "memory" if is_out_of_memory(error) else "internal"


def code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, DuatError | Stopped) else EXIT_UNDECIDED
