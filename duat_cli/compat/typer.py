"""Typer: known to work with 0.26 and 0.29.

It contains click's classes privately. These are overridden or read: `format_options`, `get_help_option`, `make_parser`,
`parse_args`, `invoke`, `params` and `commands` of commands; `multiple`, `is_flag`, `name`, `opts`, `metavar`,
`get_help_record`, `param_type_name` and `rich_help_panel` of parameters; `section` and `write_dl` of the formatter;
`get_command`, which every call of an app calls; `OptionInfo`, which `typer.Option` returns, and its `default` and
`param_decls`. Without one of these, help pages fail with an error or fall back to one flat list.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command
from typer.models import OptionInfo

__all__ = ["OptionInfo", "TyperCommand", "TyperGroup", "TyperOption", "get_command", "of_command", "usage_error"]


def of_command(error: Exception, context: Any) -> None:
    """Adds the command to a parser's error; the error of an option without its argument lacks it."""
    if hasattr(error, "format_message") and getattr(error, "ctx", None) is None:
        vars(error)["ctx"] = context


def usage_error(error: BaseException) -> tuple[str, str | None] | None:
    """(what is wrong with the command line, the command it was given to) for Typer's own errors; None for others.

    Their classes are in no public module. Without it, a wrong option is reported as an unexpected error.
    """
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    if context is None:
        return str(message()), None
    option = getattr(error, "option_name", None)
    takers = _takers(context, option)
    if not takers or context.info_name in takers:  # an option of its own, which lacks the argument
        return str(message()), context.command_path
    return f"{context.command_path} takes no {option}; it is an option of {_listed(takers)}", context.command_path


def _takers(context: Any, option: str | None) -> list[str]:
    """The other commands that know an option."""
    commands = getattr(getattr(context.parent, "command", None), "commands", {})
    return sorted(name for name, command in commands.items() if any(option in p.opts for p in command.params))


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
