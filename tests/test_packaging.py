"""What pyproject.toml says of the package is all of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "duat_cli").rglob("__init__.py")}
    assert listed - {"duat_cli.configs"} == folders  # configs/ stands beside the package
    assert len(folders) > 40
