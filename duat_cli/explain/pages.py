"""The pages in configs/docs/: a topic is a file, its title is the first line."""

from __future__ import annotations

import importlib.resources

from duat_cli.explain.readings import readings
from duat_cli.results.explain import Explanation, Kind

FOLDER, SUFFIX = "docs", ".md"


def topics() -> list[Explanation]:
    folder = importlib.resources.files("duat_cli.configs") / FOLDER
    files = sorted((f for f in folder.iterdir() if f.name.endswith(SUFFIX)), key=lambda f: f.name)
    found = []
    for file in files:
        page = file.read_text(encoding="utf-8")
        title = page.partition("\n")[0].lstrip("# ")
        found.append(_entry(file.name.removesuffix(SUFFIX), "topic", title, page))
    return found


def words() -> list[Explanation]:
    return [_entry(name, "word", definition, None) for name, definition in readings().words.items()]


def _entry(name: str, kind: Kind, definition: str, page: str | None) -> Explanation:
    return Explanation(
        name=name, kind=kind, where=[], columns=[], definition=definition, formula=None, unit=None, source=None,
        exact=None, nulls=[], facts={}, page=page,
    )  # fmt: skip
