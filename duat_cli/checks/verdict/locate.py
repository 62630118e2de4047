"""The file and line that a reader of an outcome should open."""

from __future__ import annotations

import functools
from pathlib import Path

from duat_cli.checks.baseline import lines_of
from duat_cli.checks.rule import Evidence
from duat_cli.loading.declared.facts import GENERATION, TOKENIZER
from duat_cli.results.check import Location
from duat_cli.text import expanded

_FILES = {GENERATION: "generation_config.json", TOKENIZER: "tokenizer.json"}  # by the beginning of a place's name


class Locator:
    """Finds the file and line that a reader of an outcome should open: in the baseline or the policy, else in the file
    of the checkpoint that the outcome is about, else in config.json."""

    def __init__(self, evidence: Evidence, baseline: str | None, base: str | None) -> None:
        """baseline: its name. base: that name if the baseline was made in this run and is no file."""
        self._folder, self._tensors = evidence.files.path, evidence.files.tensors
        self._baseline, self._base = baseline, base
        self._entries, self._lines = functools.cache(lines_of), functools.cache(_lines)
        self._relative = functools.cache(_relative)  # hundreds of outcomes are about a few files

    def __call__(self, key: tuple[str, str] | None, where: str | None) -> Location:
        if key is None or key[0] == self._base:
            named = "" if where is None or where in self._tensors else where.partition(".")[0].removesuffix("_config")
            about = self._folder / _FILES.get(named, "config.json")
            return Location(file=self._relative(about if about.is_file() else self._folder / "config.json"), line=1)
        file, name = key
        if file == self._baseline:
            line = self._entries(expanded(file)).get(name, 1)
        else:
            line = next((number for number, text in enumerate(self._lines(file), 1) if name in text), 1)
        return Location(file=self._relative(Path(file)), line=line)


def _lines(file: str) -> list[str]:
    """The lines of a file; empty if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []


def _relative(path: Path) -> str:
    """The path as in links of a repository: relative if the file is below the working directory, else absolute."""
    path = expanded(path).absolute()
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return path.as_posix()
