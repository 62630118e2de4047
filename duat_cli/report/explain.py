"""`duat explain` as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from duat_cli.grouping import by_key
from duat_cli.report.markdown import markdown
from duat_cli.report.tables.page import BLANK, Page, indented, line
from duat_cli.results.explained.report import ExplainReport, Explanation, Kind
from duat_cli.text import clean, some

_TITLES: dict[Kind, str] = {
    "field": "a field of the reports",
    "rule": "a rule of duat check",
    "lint rule": "a lint rule of duat lora-diff",
    "word": "a word of the tables and pages",
    "topic": "a topic",
}
_SHOWN = 6  # how many paths of a field are shown


def render_explain(report: ExplainReport, page: Page) -> str:
    """The list of all names; or, for one name, the page of a topic or the explanations of everything with that name."""
    if report.asked is None:
        return page.render(*_list(report.entries))
    parts: list[RenderableType] = []
    for entry in report.entries:
        shown = markdown(entry.page, page) if entry.page else _entry(entry, report.asked)
        parts += [*([BLANK] if parts else []), *shown]
    return page.render(*parts)


def _entry(entry: Explanation, asked: str) -> list[RenderableType]:
    known = {
        "formula": entry.formula,
        "unit": entry.unit,
        "exact": entry.exact,
        "source": entry.source,
        "null": ", ".join(entry.nulls),
        **entry.facts,
        "column": _by_report(entry.columns),
        "where": _by_report(entry.where),
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in known.items():
        if text:
            grid.add_row(Text(name, style="dim"), line(text))
    head = Text(entry.name, style="bold").append(f", {_TITLES[entry.kind]}", style="dim")
    if asked.casefold() != entry.name.casefold():
        head = Text(f"{clean(asked)}: ", style="bold").append_text(head)
    return [head, indented(line(entry.sentence)), indented(grid)]


def _by_report(places: list[str]) -> str:
    """Places, given as 'report: place', in a few words: each report once, and only the first of many places."""
    found = _places_of(places)
    return "; ".join(f"{report}: {_some(names)}" if any(names) else report for report, names in found.items())


def _places_of(places: Iterable[str]) -> dict[str, list[str]]:
    """Places, given as 'report: place', by report, each once."""
    split = (place.partition(": ") for place in places)
    found = by_key((report, name) for report, _, name in split)
    return {report: list(dict.fromkeys(names)) for report, names in found.items()}


def _some(names: list[str]) -> str:
    return some(names, _SHOWN) + (" (--json)" if len(names) > _SHOWN else "")


def _list(entries: list[Explanation]) -> list[RenderableType]:
    """All names in groups: topics with their titles, columns by table, rules by family, fields by report."""
    by_kind = {kind: [entry for entry in entries if entry.kind == kind] for kind in _TITLES}
    families = by_key((entry.name.partition(".")[0], entry.name) for entry in by_kind["rule"])
    topics = Table.grid(padding=(0, 2, 0, 0))
    for entry in by_kind["topic"]:
        topics.add_row(Text(entry.name, style="cyan"), line(entry.definition))
    return [
        line("duat explain TOPIC shows a page, duat explain NAME explains one of the names below."),
        *_group("Topics", [indented(topics)]),
        *_group(
            "Columns of the tables",
            _named(_places_of(column for entry in by_kind["field"] for column in entry.columns)),
        ),
        *_group("Words", _named({"": [entry.name for entry in by_kind["word"]]})),
        *_group("Rules of duat check", _named(families)),
        *_group("Lint rules of duat lora-diff", _named({"": [entry.name for entry in by_kind["lint rule"]]})),
        *_group("Fields of the reports (--json)", _named(_fields(by_kind["field"]))),
    ]


def _group(title: str, parts: Iterable[RenderableType]) -> list[RenderableType]:
    return [BLANK, Text(title, style="bold"), *parts]


def _named(groups: dict[str, list[str]]) -> list[RenderableType]:
    """Each group as a paragraph of names."""
    return [
        indented(Text(f"{title}: " if title else "", style="cyan").append(Text(", ".join(names))))
        for title, names in groups.items()
    ]


def _fields(fields: list[Explanation]) -> dict[str, list[str]]:
    """Names of fields by report; a field that more than three reports have is under "several reports"."""
    homes = by_key((entry.name, place) for entry in fields for place in entry.where)
    reports = {name: list(_places_of(places)) for name, places in homes.items()}
    found = by_key(
        (report, name)
        for name, those in reports.items()
        for report in (those if len(those) <= 3 else ["several reports"])
    )
    return {report: sorted(names) for report, names in found.items()}
