"""What pyproject.toml says of the package is all of it, and a wheel of it is all that a user needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from children import PATIENCE
from short_demo import short_demo

import duat_cli

ROOT = Path(__file__).parents[1]


def test_every_folder_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "duat_cli").rglob("__init__.py")}
    assert listed - {"duat_cli.configs"} == folders  # configs/ stands beside the package
    assert len(folders) > 40


def installed(folder: Path) -> Path:
    """The Python of an environment with the wheel of these sources, and with the libraries of this one."""
    source, wheels = folder / "source", folder / "wheels"
    for name in ("duat_cli", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = called([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)], folder)
    assert built.returncode == 0, built.stderr
    shutil.rmtree(source)
    venv.create(folder / "venv", with_pip=False)
    python = next((folder / "venv").glob("*/python"))
    [packages] = (folder / "venv").glob("**/site-packages")
    [wheel] = wheels.iterdir()
    done = called([*pip, "--python", str(python), "install", "--no-deps", "--no-compile", str(wheel)], folder)
    assert done.returncode == 0, done.stderr
    theirs = [path for path in sys.path if path.endswith("site-packages")]  # an editable install there is not followed
    (packages / "libraries.pth").write_text("\n".join(theirs), encoding="utf-8")
    return python


def called(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user at a terminal calls it: of a gate in CI, ``check`` wants a model to be named."""
    dropped = {"PYTHONPATH", "CI", "PRE_COMMIT"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


PROMPT = ["--prompt", "def main(argv):"]
SHORT = ["short", *PROMPT]  # a model of two blocks; others read the one in the wheel
COMMANDS = {
    "inspect": [*SHORT, "--null", "uniform", "--out", "kept"],
    "attribute": SHORT,
    "matrix": SHORT,
    "compare": [*SHORT, "--prompt", "def f(x):"],
    "prune-bound": [*SHORT, "--granularity", "block", "--probes", "2", "--measure", "1"],
    "lora-diff": ["--lint"],
    "check": [*SHORT, "--policy", "strict"],
    "report": ["inspect.json"],
    "verify": PROMPT,
    "support": [],
    "plan": [],
    "explain": ["reading"],
    "merge": ["kept"],
    "schema": ["check"],
}
EVERY = """
import json, sys
import duat_cli
from duat_cli.cli.main import app, run
names = {command.name for command in app.registered_commands}
given = json.loads(sys.argv[1])
file = lambda name: name + (".json" if name == "inspect" else ".txt")
codes = {name: run([name, *words, "-o", file(name)]) for name, words in given.items() if name != "matrix"}
codes["matrix"] = run(["matrix", *given["matrix"], "-o", "w.safetensors"])
print(json.dumps([duat_cli.__file__, sorted(names), codes]))
"""


@pytest.mark.slow
def test_a_wheel_runs_every_command_without_the_sources(tmp_path: Path) -> None:
    python = installed(tmp_path)
    short_demo(tmp_path / "short")
    version = called([str(python.parent / "duat"), "--version"], tmp_path)
    assert version.stdout.startswith(f"duat {duat_cli.__version__}\n"), version.stderr
    done = called([str(python), "-c", EVERY, json.dumps(COMMANDS)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    place, names, codes = json.loads(done.stdout.splitlines()[-1])
    assert Path(place).is_relative_to(tmp_path)
    assert set(names) == set(COMMANDS)
    assert codes == dict.fromkeys(COMMANDS, 0), done.stderr[-2000:]
    assert all(next(tmp_path.glob(f"{name}.*")).stat().st_size for name in COMMANDS if name != "matrix")
