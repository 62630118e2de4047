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
"""Metavars of what names a file or a folder, or may."""
_GLUE = "\N{NO-BREAK SPACE}"
_AS_IT_IS = "\b\n"  # the formatter then keeps these lines

Rows = list[tuple[str, str]]
Sections = dict[str, Rows]


class Formatter(Protocol):
    """What writes a page."""

    width: int

    def section(self, name: str) -> AbstractContextManager[None]:
        """A heading, and what is written meanwhile below it."""

    def write_dl(self, rows: Rows, col_max: int = ..., col_spacing: int = ...) -> None:
        """Names, and beside them what they mean."""


class Command(TyperCommand):
    """A command whose page has a section for every panel of options, and whose options of one value are given once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """InputError for an option of one value that is given twice: the last would count, and nothing would say so."""
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
        """InputError, before anything is computed, where a result would take the place of what the run reads."""
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
    """The first screen: a section for every panel of commands."""

    def format_options(self, ctx: Any, formatter: Formatter) -> None:
        _write(formatter, _of_commands(self) | _of_parameters(self, ctx))

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # None is no bool: `duat inspect --help` would load pydantic to convert it
        return option

    def get_params(self, ctx: Any) -> Any:
        """The same of the flags that write a shell's completion."""
        found = super().get_params(ctx)
        for parameter in found:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return found


def written(parameter: Any) -> str:
    """How a parameter is named on the command line, as messages name it."""
    return str(parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[0])


def _of_commands(group: TyperGroup) -> Sections:
    sections: Sections = {}
    for name, command in group.commands.items():
        panel = getattr(command, "rich_help_panel", None) or "Commands"
        summary, _, _ = inspect.cleandoc(command.help or "").partition("\n\n")
        sections.setdefault(panel, []).append((name, summary))
    return sections


def _of_parameters(command: TyperCommand | TyperGroup, ctx: Any) -> Sections:
    """Arguments first; last what belongs to no panel, which is -h and its like."""
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
    """Long names stand below each other, whether a short one comes before or not."""
    return f"    {names}" if names.startswith("--") else names


def _write(formatter: Formatter, sections: Sections) -> None:
    """One column of names on the whole page."""
    sections = {title: rows for title, rows in sections.items() if rows}
    widest = max(len(name) for rows in sections.values() for name, _ in rows)
    for title, rows in sections.items():
        with formatter.section(title):
            room = formatter.width - widest - 4  # an indent of two, two between the columns
            formatter.write_dl([(name.ljust(widest), _wrapped(text, room)) for name, text in rows], widest)


def _wrapped(text: str, width: int) -> str:
    """The formatter's own wrapping breaks options at their hyphens, [default: 3] at its space, and after a lone -."""
    meaning, gap, note = text.replace(" - ", f" -{_GLUE}").rpartition("  [")
    whole = f"{meaning} [{note.replace(' ', _GLUE)}" if gap else note
    lines = textwrap.wrap(whole, width, break_on_hyphens=False, break_long_words=False)
    return _AS_IT_IS + "\n".join(lines).replace(_GLUE, " ")
