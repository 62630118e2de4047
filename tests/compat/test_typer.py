"""The names of Typer that duat relies on mean what duat takes them for."""

from __future__ import annotations

import inspect

import pytest
import typer

from duat_cli.compat import typer as compat


def one_command(number: int = typer.Option(1, rich_help_panel="Numbers", help="A number.")) -> None:
    """A command."""


def app() -> typer.Typer:
    made = typer.Typer(name="tool", add_completion=False, pretty_exceptions_enable=False)
    made.callback(cls=compat.TyperGroup)(lambda: None)
    made.command("one", cls=compat.TyperCommand)(one_command)
    return made


@pytest.mark.parametrize("cls", [compat.TyperCommand, compat.TyperGroup])
def test_what_help_overrides_is_there(cls: type) -> None:
    assert list(inspect.signature(cls.format_options).parameters) == ["self", "ctx", "formatter"]
    assert list(inspect.signature(cls.get_help_option).parameters) == ["self", "ctx"]


def test_what_help_reads_is_there() -> None:
    group = typer.main.get_command(app())
    assert isinstance(group, compat.TyperGroup)
    command = group.commands["one"]
    assert isinstance(command, compat.TyperCommand)
    (option,) = (p for p in command.params if p.name == "number")
    assert isinstance(option, compat.TyperOption)
    assert (option.param_type_name, option.rich_help_panel) == ("option", "Numbers")
    context = typer.Context(command)
    record = option.get_help_record(context)
    assert record is not None
    assert record[1].startswith("A number.")


@pytest.mark.parametrize(("line", "command"), [(["one", "--nope"], "tool one"), (["two"], "tool")])
def test_usage_errors_say_what_and_where(line: list[str], command: str) -> None:
    with pytest.raises(Exception, match=r"nope|two") as caught:
        app()(line, prog_name="tool", standalone_mode=False)
    usage = compat.usage_error(caught.value)
    assert usage is not None
    assert line[-1] in usage[0]
    assert usage[1] == command


def test_other_errors_are_none_of_typers() -> None:
    assert compat.usage_error(ValueError("x")) is None
