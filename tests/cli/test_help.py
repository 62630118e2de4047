"""Help pages: complete, readable at 80 columns, and there at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from running import Duat, environment

COMMANDS = ("inspect", "verify", "support", "schema")
HEAVY = ("torch", "transformers")


def heavy_imports(pages: list[list[str]], before: str = "") -> list[str]:
    """Which heavy modules these help pages load, in a fresh process."""
    script = (
        f"import sys; {before}\n"
        "from duat_cli.cli.main import run\n"
        f"code = max(run(arguments) for arguments in {pages!r})\n"
        f"print('LOADED', code, *(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    code, *loaded = result.stdout.splitlines()[-1].split()[1:]
    assert code == "0"
    return loaded


def test_help_imports_nothing_heavy() -> None:
    assert heavy_imports([["--help"], *([name, "--help"] for name in COMMANDS)]) == []


def test_the_check_for_heavy_imports_can_fail() -> None:
    fake = "import types; sys.modules['torch'] = types.ModuleType('torch')"
    assert heavy_imports([["--help"]], before=fake) == ["torch"]


def test_first_screen(duat: Duat) -> None:
    page = duat("--help").stdout
    assert duat().stdout.rstrip() == page.rstrip()
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


def test_inspect_has_every_option(duat: Duat) -> None:
    page = duat("inspect", "-h").stdout
    options = (
        "prompt prompts max-tokens layers device dtype revision token cache-dir trust-remote-code format "
        "json output quiet verbose no-color threshold conv-width spectrum terms per-prompt matrices no-cache"
    )
    for option in options.split():
        assert f"--{option} " in page
    assert "as sharp as the" in page
