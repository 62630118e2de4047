"""Versions as the libraries themselves say them."""

from __future__ import annotations

import importlib
import platform

import pytest

import duat_cli
from duat_cli.cli.terminal import versions


def test_every_library_has_its_version() -> None:
    first, second, *rest = versions.versions().splitlines()
    assert first == f"duat {duat_cli.__version__}"
    assert second.startswith(f"python {platform.python_version()} on ")
    found = {
        name: version.partition("+")[0] for name, version in (line.split(" ", 1) for line in rest)
    }  # less the build
    own = {name: importlib.import_module(name).__version__ for name in versions.LIBRARIES}
    assert found == {name: version.partition("+")[0] for name, version in own.items()}


def test_one_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "LIBRARIES", ("no_such_library",))
    assert versions.versions().endswith("\nno_such_library not installed\n")
