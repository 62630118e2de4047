"""The pages in configs/docs/, where a topic is a file whose first line is its title; words from configs/words.toml."""

from __future__ import annotations

import importlib.resources
import tomllib

from duat_cli.results.explain import Explanation

FOLDER, SUFFIX = "docs", ".md"
WORDS = "words.toml"
_CONFIGS = importlib.resources.files("duat_cli.configs")


def topics() -> list[Explanation]:
    files = sorted((f for f in (_CONFIGS / FOLDER).iterdir() if f.name.endswith(SUFFIX)), key=lambda f: f.name)
    found = []
    for file in files:
        page = file.read_text(encoding="utf-8")
        title = page.partition("\n")[0].lstrip("# ")
        found.append(Explanation.of(file.name.removesuffix(SUFFIX), "topic", title, page=page))
    return found


def words() -> list[Explanation]:
    found = tomllib.loads((_CONFIGS / WORDS).read_text(encoding="utf-8"))
    return [Explanation.of(name, "word", definition) for name, definition in found.items()]
