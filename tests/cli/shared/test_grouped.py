"""A command has the options of its groups, in their order, and gets them as groups."""

from __future__ import annotations

from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from duat_cli.cli.shared.grouped import Options, grouped


class Shape(Options):
    width: int = typer.Option(2, "--width")
    colour: Literal["red", "blue"] = typer.Option("red", "--colour")
    closed: bool = typer.Option(False, "--closed")
    no_line: bool = typer.Option(None)


class Grey(Shape):
    width: int = typer.Option(7, "--width", "-w")
    colour: None = None  # type: ignore[assignment]


@grouped
def draw(name: str = typer.Argument("it"), *, shape: Shape, times: int = typer.Option(1, "--times")) -> int:
    """Draws."""
    typer.echo(f"{name} {shape.width} {shape.colour} {shape.closed} {times}")
    return 0


@grouped
def dull(*, shape: Grey) -> int:
    """Draws in grey."""
    typer.echo(f"{shape.width} {shape.colour} {shape.closed} {shape.no_line}")
    return 0


def said(command: object, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)  # type: ignore[arg-type]
    done = CliRunner().invoke(app, list(arguments))
    return done.output.strip()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "it 2 red False 1"),
        (("a", "--width", "3", "--colour", "blue", "--closed", "--times", "4"), "a 3 blue True 4"),
    ],
)
def test_what_is_given_comes_in_groups(arguments: tuple[str, ...], expected: str) -> None:
    assert said(draw, *arguments) == expected


def test_another_class_has_its_own_options_in_the_same_order() -> None:
    assert [one.name for one in Shape.parameters] == ["width", "colour", "closed", "no_line"]
    assert [one.name for one in Grey.parameters] == ["width", "closed", "no_line"]
    assert said(dull, "-w", "5") == "5 None False False"
    assert "No such option" in said(dull, "--colour", "red")


def test_an_option_without_a_name_has_that_of_its_attribute() -> None:
    assert said(dull, "--no-line") == "7 None False True"
    assert "No such option" in said(dull, "--no-no-line")


def test_options_stand_where_the_group_does() -> None:
    assert "Draws." in said(draw, "--help")
    places = [said(draw, "--help").index(name) for name in ("--width", "--colour", "--closed", "--times")]
    assert places == sorted(places)


def test_without_a_command_line_options_have_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw("b", closed=True, times=2) == 0
    assert capsys.readouterr().out.strip() == "b 2 red True 2"
    shape = Shape(width=9)
    assert (shape.width, shape.colour, shape.closed) == (9, "red", False)
