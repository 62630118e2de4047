"""The definitions that a page links to: texts of `duat explain` for the fields that the page shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from duat_cli.report.html.drawing.figure import Sheet
from duat_cli.results.explained.report import Explanation

Known = Mapping[tuple[str, str], Explanation]
"""Explanations by command and path of the field, such as ('inspect', 'blocks[].terms.linear')."""


@dataclass
class Entry:
    """One definition. anchor: its anchor on the page."""

    anchor: str
    explanation: Explanation
    places: list[str] = field(default_factory=list)
    """Fields on this page that it explains."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Further facts beside the definition, as `duat explain` lists them."""
        e = self.explanation
        known = {
            "formula": e.formula,
            "unit": e.unit,
            "exact": e.exact,
            "source": e.source,
            "needs": e.facts.get("needs"),
        }
        return [*((name, text) for name, text in known.items() if text), ("field", ", ".join(self.places))]


class Glossary:
    """The definitions of everything on some sheets, in order of appearance."""

    def __init__(self, sheets: Iterable[Sheet], known: Known) -> None:
        self._anchors: dict[tuple[str, str], Entry] = {}
        of: dict[int, Entry] = {}
        for sheet in sheets:
            for path in dict.fromkeys(_paths(sheet)):
                place = (sheet.command, path)
                explanation = known.get(place)
                if explanation is None or place in self._anchors:
                    continue
                entry = of.setdefault(id(explanation), Entry(f"d{len(of)}", explanation))
                entry.places.append(path)
                self._anchors[place] = entry
        self.entries = list(of.values())

    def entry(self, command: str, path: str) -> Entry | None:
        """The definition of a field; None where `duat explain` has none."""
        return self._anchors.get((command, path))

    def linked(self, command: str, paths: Iterable[str]) -> list[tuple[str, str]]:
        """(anchor, name) of each definition of some fields; fields with the same name also get their parent's name."""
        found = {e.anchor: path for path in paths if (e := self.entry(command, path)) is not None}
        names = [path.rpartition(".")[2] for path in found.values()]
        return [
            (anchor, name if names.count(name) == 1 else ".".join(path.replace("[]", "").split(".")[-2:]))
            for (anchor, path), name in zip(found.items(), names, strict=True)
        ]


def _paths(sheet: Sheet) -> Iterator[str]:
    for tile in sheet.tiles:
        yield tile.field
    for figure in sheet.figures:
        yield from figure.terms
        for table in figure.tables:
            yield from (table.place + head.path for head in table.heads if head.path)
