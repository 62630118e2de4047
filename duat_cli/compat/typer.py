"""Typer: known to work with 0.26 and 0.29.

It carries click's classes privately. What is overridden or read of them: `format_options`, `get_help_option` and
`commands` of commands; `get_help_record`, `param_type_name` and `rich_help_panel` of parameters; `section` and
`write_dl` of the formatter; `get_command`, which an app that is called calls every time. Without one of these, help
pages fail with an error or fall back to one flat list.
"""

from __future__ import annotations

from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

__all__ = ["TyperCommand", "TyperGroup", "TyperOption", "get_command", "usage_error"]


def usage_error(error: BaseException) -> tuple[str, str | None] | None:
    """(what was wrong with the command line, the command it was given to) of Typer's own errors; None for others.

    Their classes stand in no public module. Without it, a wrong option is reported as an unexpected error.
    """
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    return str(message()), context.command_path if context is not None else None
