"""Help pages: complete, readable at 80 columns, and there at once."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer
from children import PATIENCE
from running import Duat, environment

from duat_cli.cli.main import app

COMMANDS = ("inspect", "attribute", "matrix", "merge", "report", "verify", "support", "explain", "schema")
HEAVY = ("torch", "transformers", "pydantic", "rich.markdown", "typer.rich_utils")
PAGES = [["--help"], [], *([name, "--help"] for name in COMMANDS)]
WRONG_USAGE = [["inspekt"], ["--nope"], *([name, "--nope"] for name in COMMANDS), ["matrix", "--layer"]]
PANELS = {
    "": ("Read a checkpoint", "How far to trust it", "What it means", "For programs", "Options"),
    "inspect": ("Arguments", "Input", "What to compute", "Loading", "Output", "Other options"),
    "attribute": ("Arguments", "Input", "What to compute", "Loading", "Output", "Other options"),
    "matrix": ("Arguments", "Input", "Loading", "Output", "Other options"),
    "verify": ("Arguments", "Input", "Loading", "Output", "Other options"),
    "support": ("Arguments", "What to compute", "Loading", "Output", "Other options"),
    "explain": ("Arguments", "Output", "Other options"),
    "merge": ("Arguments", "Output", "Other options"),
    "report": ("Arguments", "Output", "Other options"),
    "schema": ("Arguments", "Output", "Other options"),
}


def heavy_imports(lines: list[list[str]], exit_code: int, before: str = "") -> list[str]:
    """Which heavy modules these command lines load, in a fresh process; all end with the exit code."""
    script = (
        f"import sys, types; {before}\n"
        "from duat_cli.cli.main import run\n"
        f"codes = {{run(arguments) for arguments in {lines!r}}}\n"
        f"print('LOADED', *codes, *(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    code, *loaded = result.stdout.splitlines()[-1].split()[1:]
    assert code == str(exit_code)
    return loaded


def test_help_imports_nothing_heavy() -> None:
    assert heavy_imports(PAGES, exit_code=0) == []


def test_usage_errors_import_nothing_heavy() -> None:
    assert heavy_imports(WRONG_USAGE, exit_code=2) == []


def test_the_check_for_heavy_imports_can_fail() -> None:
    fakes = "; ".join(f"sys.modules[{name!r}] = types.ModuleType({name!r})" for name in HEAVY)
    assert heavy_imports([["--help"]], exit_code=0, before=fakes) == list(HEAVY)


def test_first_screen(duat: Duat) -> None:
    page = duat("--help").stdout
    assert duat().stdout == page
    for word in (*COMMANDS, "--version", "Exit codes", "Read a checkpoint"):
        assert word in page
    assert max(map(len, page.split("\n"))) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_command_pages(duat: Duat, name: str) -> None:
    for width in ("80", "120"):
        page = duat(name, "--help", COLUMNS=width)
        assert page.returncode == 0
        assert max(map(len, page.stdout.split("\n"))) <= int(width)
        assert "…" not in page.stdout


@pytest.mark.parametrize("name", PANELS)
def test_pages_have_their_panels(duat: Duat, name: str) -> None:
    page = duat(*name.split(), "--help").stdout
    assert tuple(re.findall(r"^(\w.*):$", page, re.MULTILINE)) == PANELS[name]


@pytest.mark.parametrize("width", ["40", "80", "120"])
@pytest.mark.parametrize("name", PANELS)
def test_pages_say_everything_in_two_columns(duat: Duat, name: str, width: str) -> None:
    page = duat(*name.split(), "--help", COLUMNS=width).stdout
    assert not re.search(r"<[\w|]+>|\[/?bold\]|\.\.\.(?!$)|\xa0|[ ]$", page, re.MULTILINE)
    assert len(meaning_columns(page)) == 1
    words = " ".join(page.split())
    for text in said_by_command(name):
        assert " ".join(text.split()) in words


def said_by_command(name: str) -> list[str]:
    """What a page has to say: the command's own text, every metavar, meaning, default and bound."""
    group = typer.main.get_command(app)
    command = getattr(group, "commands", {}).get(name, group)
    with typer.Context(command) as context:
        said = [text for parameter in command.params for text in parameter.get_help_record(context) or ()]
    said = [re.sub(r" <.*>", "", text) for text in said]  # Typer's own names of types
    subcommands = [] if name else getattr(group, "commands", {}).values()
    return [*said, command.help or "", *((other.help or "").split("\n\n")[0] for other in subcommands)]


def meaning_columns(page: str) -> set[int]:
    """Where the second column begins, below the headings, and where it goes on."""
    name = r" {2,6}(?:-\w, )?[-\w]+(?:, --\w+)?(?: [A-Z]+)? {2,}"
    found = re.finditer(rf"^(?:{name}| {{7,}})(?=\S)", page, re.MULTILINE)
    return {len(match.group()) for match in found}


def test_pages_follow_the_terminal_up_to_120_columns(duat: Duat) -> None:
    widths = {width: max(map(len, duat("inspect", "-h", COLUMNS=width).stdout.split("\n"))) for width in ("120", "300")}
    assert 100 < widths["120"] == widths["300"] <= 120


def test_options_are_not_broken_at_their_hyphens(duat: Duat) -> None:
    for width in range(60, 121):
        page = duat("inspect", "-h", COLUMNS=str(width)).stdout
        for together in ("1-D", "[default: 3; x>=1]", "0-3,7", "- is"):
            assert together in page


def test_inspect_has_every_option(duat: Duat) -> None:
    page = duat("inspect", "-h").stdout
    options = (
        "prompt prompts max-tokens layers device dtype revision token cache-dir trust-remote-code format "
        "json output wide quiet verbose no-color threshold conv-width spectrum terms per-prompt matrices no-cache"
    )
    for option in options.split():
        assert f"--{option} " in page
    assert "as sharp as the" in " ".join(page.split())
