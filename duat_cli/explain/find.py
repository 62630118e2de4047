"""All explanations, and those of one name: of fields, of the rules of `duat check`, of the lint rules of `duat
lora-diff`, and of configs/. There, a topic is a file of docs/ whose first line is its title."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import tomllib
from collections.abc import Iterator

from duat_cli import __version__
from duat_cli.checks.nearest import suggestion
from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Need, Rule
from duat_cli.checks.rules.adapter import LEVELS, LINT
from duat_cli.errors import InputError
from duat_cli.explain.fields import fields
from duat_cli.grouping import by_key
from duat_cli.report.headers import printed
from duat_cli.results.explained.report import ExplainReport, Explanation
from duat_cli.text import shown

_CONFIGS = importlib.resources.files("duat_cli.configs")
_NEEDS: dict[Need, str] = {
    "load": "the model loaded",
    "report": "a forward pass",
    "slack": "`duat prune-bound`'s sets, which take minutes",
    "behaviour": "a forward pass",
    "predictions": "a model that predicts tokens or classes",
    "answers": "a baseline that holds answers",
    "tuned": "a loss of the model itself",
    "baseline": "--baseline",
    "adapter": "--adapter",
    "declared": "a baseline of this version of duat",
    "tokenizer": "the tokenizer",
}
_PAGES = {  # topics of commands whose own names are no topics
    "check": "gate",
    "explain": "reading",
    "inspect": "reading",
    "lora-diff": "fine-tunes",
    "matrix": "operator-file",
    "merge": "many-prompts",
    "plan": "size",
    "prune-bound": "pruning",
    "report": "pages",
    "schema": "from-python",
    "support": "coverage",
    "verify": "reading",
}
_OWN_LIMIT = "within bounds of its own: of the policy, of the baseline's tolerance, or of the dtype"


def explain(asked: str | None) -> ExplainReport:
    """All entries, or those with this name: a topic, a field (by name or path), a column's header, a rule or a word. A
    name without an entry is then looked up as the plural of a name, as a command, and as words of a column's header.

    InputError names the nearest known name where there is none.
    """
    entries = everything()
    if asked is not None:
        wanted = _plain(asked)
        entries = sorted(next(filter(None, _found(wanted)), []), key=lambda entry: _rank(entry, wanted))
        if not entries:
            known = dict.fromkeys(name for entry in everything() for name in _names(entry))
            raise InputError(
                f"NAME {shown(asked)}: no column, field, rule, word or topic is named so{suggestion(asked, known)}; "
                "duat explain lists all"
            )
    return ExplainReport(duat_version=__version__, asked=asked, entries=entries)


def _found(wanted: str) -> Iterator[list[Explanation]]:
    """Lists of entries that may be meant, the likeliest first."""
    named = _by_name()
    yield named.get(wanted, [])
    yield named.get(wanted.removesuffix("s"), [])
    yield named.get(_PAGES.get(wanted, ""), [])
    yield _by_words().get(_bare(wanted), [])


def _rank(entry: Explanation, wanted: str) -> tuple[bool, bool, bool, int, bool]:
    """Sort key of entries of one name: words and topics come first, then fields that a table prints under that name,
    and of these the ones least deep in their report."""
    named = _plain(entry.name) == wanted
    printed = wanted in (_plain(column.partition(": ")[2]) for column in entry.columns)
    depth = min((place.count(".") for place in entry.where if entry.kind == "field"), default=0)
    return (not (named and entry.kind in ("word", "topic")), not printed, not named, depth, entry.formula is None)


@functools.cache
def everything() -> list[Explanation]:
    rules = (_rule(rule) for rule in all_rules().values())
    # the linter's ids: each is also a rule adapter.*, whose levels are the linter's under other names
    lint = (_lint(name, rule) for name, rule in LINT.items())
    return [*_topics(), *_words(), *fields(), *rules, *lint]


@functools.cache
def _by_name() -> dict[str, list[Explanation]]:
    """Entries by each of their names and paths, in the form of `_plain`."""
    return by_key(
        (name, entry)
        for entry in everything()
        for name in dict.fromkeys(_plain(name) for name in (*_names(entry), *_paths(entry)))
    )


@functools.cache
def _by_words() -> dict[str, list[Explanation]]:
    """Fields by sequences of adjacent words in the printed headers of their columns, units included."""
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
    """The words without the comma between a header and its unit."""
    return " ".join(word.strip(",") for word in words.split())


def _names(entry: Explanation) -> Iterator[str]:
    """The entry's name, and the headers of its columns."""
    yield entry.name
    yield from (column.partition(": ")[2] for column in entry.columns)


def _paths(entry: Explanation) -> Iterator[str]:
    """Every suffix of a field's paths."""
    for place in entry.where if entry.kind == "field" else ():
        path = place.partition(": ")[2]
        while path:
            yield path
            path = path.partition(".")[2]


def _plain(name: str) -> str:
    """The name without the case, spaces, quotes and the [] of lists, which make no difference."""
    return " ".join(name.replace("[]", "").replace("`", "").replace("\N{PRIME}", "'").casefold().split())


def _rule(rule: Rule) -> Explanation:
    limit = _OWN_LIMIT if rule.max is None else f"at most {rule.max:g} {rule.unit}".rstrip()
    facts = {"level": rule.level, "passes": limit, "needs": ", ".join(_NEEDS[need] for need in rule.needs)}
    facts |= {"allowed": ", ".join(rule.allowed or ()), "advice": rule.advice}
    said = {name: text for name, text in facts.items() if text}
    return Explanation.of(rule.id, "rule", rule.about, "duat check", unit=rule.unit or None, facts=said)


def _lint(name: str, rule: Rule) -> Explanation:
    facts = {"level": LEVELS[name], "in duat check": rule.id, "advice": rule.advice}
    return Explanation.of(name, "lint rule", rule.about, "duat lora-diff --lint", facts=facts)


def _topics() -> list[Explanation]:
    files = sorted((f for f in (_CONFIGS / "docs").iterdir() if f.name.endswith(".md")), key=lambda f: f.name)
    found = []
    for file in files:
        page = file.read_text(encoding="utf-8")
        title = page.partition("\n")[0].lstrip("# ")
        found.append(Explanation.of(file.name.removesuffix(".md"), "topic", title, page=page))
    return found


def _words() -> list[Explanation]:
    found = tomllib.loads((_CONFIGS / "words.toml").read_text(encoding="utf-8"))
    return [Explanation.of(name, "word", definition) for name, definition in found.items()]
