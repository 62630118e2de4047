"""Typer: known to work with 0.26 and 0.29.

It carries click's classes privately. What is overridden or read of them: `format_options`, `get_help_option`,
`make_parser`, `parse_args`, `invoke`, `params` and `commands` of commands; `multiple`, `is_flag`, `name`, `opts`,
`metavar`, `get_help_record`, `param_type_name` and `rich_help_panel` of parameters; `section` and `write_dl` of the
formatter; `get_command`, which an app that is called calls every time; `OptionInfo`, which `typer.Option` gives, and
its `default` and `param_decls`. Without one of these, help pages fail with an error or fall back to one flat list.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command
from typer.models import OptionInfo

__all__ = ["OptionInfo", "TyperCommand", "TyperGroup", "TyperOption", "get_command", "of_command", "usage_error"]


def of_command(error: Exception, context: Any) -> None:
    """Says of a parser's error which command it is of: an option without its argument knows none."""
    if hasattr(error, "format_message") and getattr(error, "ctx", None) is None:
        vars(error)["ctx"] = context


def usage_error(error: BaseException) -> tuple[str, str | None] | None:
    """(what was wrong with the command line, the command it was given to) of Typer's own errors; None for others.

    Their classes stand in no public module. Without it, a wrong option is reported as an unexpected error.
    """
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    if context is None:
        return str(message()), None
    option = getattr(error, "option_name", None)
    takers = _takers(context, option)
    if not takers or context.info_name in takers:  # of its own options it lacks the argument
        return str(message()), context.command_path
    return f"{context.command_path} takes no {option}; it is an option of {_listed(takers)}", context.command_path


def _takers(context: Any, option: str | None) -> list[str]:
    """The other commands that know an option."""
    commands = getattr(getattr(context.parent, "command", None), "commands", {})
    return sorted(name for name, command in commands.items() if any(option in p.opts for p in command.params))


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
