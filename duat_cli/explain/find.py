"""All explanations, and those of one name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from duat_cli import __version__
from duat_cli.checks.nearest import suggestion
from duat_cli.errors import InputError
from duat_cli.explain.fields import fields
from duat_cli.explain.pages import topics, words
from duat_cli.explain.rules import lint_rules, rules
from duat_cli.report.headers import printed
from duat_cli.results.explain import ExplainReport, Explanation
from duat_cli.text import shown


def explain(asked: str | None) -> ExplainReport:
    """Everything, or what has this name: a topic, a field (by name or path), a column's header, a rule or a word.

    InputError names the nearest known name where there is none.
    """
    entries = everything()
    if asked is not None:
        wanted = _plain(asked)
        entries = sorted(
            _by_name().get(wanted) or _by_words().get(_bare(wanted), []),
            key=lambda entry: (_plain(entry.name) != wanted, entry.formula is None),
        )
        if not entries:
            known = dict.fromkeys(name for entry in everything() for name in _names(entry))
            raise InputError(
                f"NAME {shown(asked)}: no column, field, rule, word or topic is named so{suggestion(asked, known)}; "
                "duat explain lists all"
            )
    return ExplainReport(duat_version=__version__, asked=asked, entries=entries)


@functools.cache
def everything() -> list[Explanation]:
    return [*topics(), *words(), *fields(), *rules(), *lint_rules()]


@functools.cache
def _by_name() -> dict[str, list[Explanation]]:
    """Entries by each of their names and paths, as `_plain` has them."""
    found: dict[str, list[Explanation]] = {}
    for entry in everything():
        for name in {_plain(name): None for name in (*_names(entry), *_paths(entry))}:
            found.setdefault(name, []).append(entry)
    return found


@functools.cache
def _by_words() -> dict[str, list[Explanation]]:
    """Fields by words that stand side by side in the printed headers of their columns, units included."""
    at = {place: entry for entry in everything() if entry.kind == "field" for place in entry.where}
    found: dict[str, list[Explanation]] = {}
    for (report, path), titles in printed().items():
        entry = at[f"{report}: {path}"]
        for parts in (_bare(_plain(title)).split() for title in titles):
            for first, last in itertools.combinations(range(len(parts) + 1), 2):
                entries = found.setdefault(" ".join(parts[first:last]), [])
                if entry not in entries:
                    entries.append(entry)
    return found


def _bare(words: str) -> str:
    """Without what stands between a header and its unit."""
    return " ".join(word.strip(",") for word in words.split())


def _names(entry: Explanation) -> Iterator[str]:
    """Its name, and the headers of its columns."""
    yield entry.name
    yield from (column.partition(": ")[2] for column in entry.columns)


def _paths(entry: Explanation) -> Iterator[str]:
    """Every end of a field's paths."""
    for place in entry.where if entry.kind == "field" else ():
        path = place.partition(": ")[2]
        while path:
            yield path
            path = path.partition(".")[2]


def _plain(name: str) -> str:
    """Case, spaces, quotes and the [] of lists make no difference."""
    return " ".join(name.replace("[]", "").replace("`", "").replace("\N{PRIME}", "'").casefold().split())
