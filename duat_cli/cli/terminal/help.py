"""Help pages as plain text sections.

Typer's own pages come from rich, which imports a Markdown parser and a syntax highlighter to write them.
"""

from __future__ import annotations

import inspect
import textwrap
from contextlib import AbstractContextManager
from typing import Any, Protocol

from duat_cli.compat.typer import TyperCommand, TyperGroup, TyperOption, of_command
from duat_cli.errors import InputError

PANEL_ARGUMENTS = "Arguments"
PATHS = {"FILE", "FILE|SHARE", "DIR", "MAP", "POLICY", "MODEL", "BASE", "TUNED", "OTHER", "ADAPTER"}
"""Metavars whose values name a file or a folder, or may do so."""
_GLUE = "\N{NO-BREAK SPACE}"
_AS_IT_IS = "\b\n"  # makes the formatter keep the lines that follow

Rows = list[tuple[str, str]]
Sections = dict[str, Rows]


class Formatter(Protocol):
    """Writer of a help page."""

    width: int

    def section(self, name: str) -> AbstractContextManager[None]:
        """Writes a heading; rows written within the context go below it."""

    def write_dl(self, rows: Rows, col_max: int = ..., col_spacing: int = ...) -> None:
        """Writes names with their meanings beside them."""


class Command(TyperCommand):
    """A command whose help page has a section for every panel of options; refuses a one-value option given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises InputError for an option of one value that is given twice, as the last would silently count."""
        try:
            given: list[Any] = list(self.make_parser(ctx).parse_args(list(args))[2])
        except Exception as error:
            of_command(error, ctx)
            raise
        for option in given:
            once = option.param_type_name == "option" and not (option.multiple or option.is_flag)
            if once and (count := given.count(option)) > 1:
                raise InputError(f"{option.opts[-1]}: given {count} times; it takes one value")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Raises InputError, before anything is computed, where a result would overwrite a file that the run reads."""
        from duat_cli.api.target import refuse_overwriting

        results = {"output", "report", "export", "matrices", "baseline" if ctx.params.get("update_baseline") else ""}
        writes, reads = list[tuple[str, Any]](), list[tuple[str, Any]]()
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            name = written(parameter)
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if parameter.name in results:
                    writes.append((name, one.partition("=")[2] if parameter.name == "report" else one))
                elif parameter.metavar in PATHS:
                    reads.append((name, one))
        refuse_overwriting(writes, reads)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Formatter) -> None:
        _write(formatter, _of_parameters(self, ctx))


class Group(TyperGroup):
    """The command group; its help page has a section for every panel of commands."""

    def format_options(self, ctx: Any, formatter: Formatter) -> None:
        _write(formatter, _of_commands(self) | _of_parameters(self, ctx))

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # with None, `duat inspect --help` would load pydantic to convert it
        return option

    def get_params(self, ctx: Any) -> Any:
        """Parameters with False as the default of flags, such as those that write a shell's completion."""
        found = super().get_params(ctx)
        for parameter in found:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return found


def written(parameter: Any) -> str:
    """Name of a parameter on the command line, as messages use it."""
    return str(parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[0])


def _of_commands(group: TyperGroup) -> Sections:
    sections: Sections = {}
    for name, command in group.commands.items():
        panel = getattr(command, "rich_help_panel", None) or "Commands"
        summary, _, _ = inspect.cleandoc(command.help or "").partition("\n\n")
        sections.setdefault(panel, []).append((name, summary))
    return sections


def _of_parameters(command: TyperCommand | TyperGroup, ctx: Any) -> Sections:
    """Sections of a command's parameters: arguments first, last those without a panel, such as -h."""
    sections: Sections = {PANEL_ARGUMENTS: []}
    rest: Rows = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:  # hidden
            continue
        name, text = record
        panel = getattr(parameter, "rich_help_panel", None)
        if parameter.param_type_name == "argument":
            sections[PANEL_ARGUMENTS].append((parameter.metavar or name, text))
        elif panel is None:
            rest.append((_in_column(name), text))
        else:
            sections.setdefault(panel, []).append((_in_column(name), text))
    title = "Other options" if len(sections) > 1 else "Options"
    return sections | {title: rest}


def _in_column(names: str) -> str:
    """Names of an option, indented so that long names are aligned with and without a short one in front."""
    return f"    {names}" if names.startswith("--") else names


def _write(formatter: Formatter, sections: Sections) -> None:
    """Writes the sections with one column of names on the whole page."""
    sections = {title: rows for title, rows in sections.items() if rows}
    widest = max(len(name) for rows in sections.values() for name, _ in rows)
    for title, rows in sections.items():
        with formatter.section(title):
            room = formatter.width - widest - 4  # an indent of two, two between the columns
            formatter.write_dl([(name.ljust(widest), _wrapped(text, room)) for name, text in rows], widest)


def _wrapped(text: str, width: int) -> str:
    """Wraps text, as the formatter itself breaks options at hyphens, [default: 3] at its space, and after a lone -."""
    meaning, gap, note = text.replace(" - ", f" -{_GLUE}").rpartition("  [")
    whole = f"{meaning} [{note.replace(' ', _GLUE)}" if gap else note
    lines = textwrap.wrap(whole, width, break_on_hyphens=False, break_long_words=False)
    return _AS_IT_IS + "\n".join(lines).replace(_GLUE, " ")
