"""The parts of a page: a sheet per report, with facts, verdict, leading numbers and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markupsafe import Markup
from rich.text import Text

from duat_cli.report.html.drawing.plot import Sample, legend
from duat_cli.report.html.drawing.table import Table, field_of
from duat_cli.report.tables import facts
from duat_cli.report.tables.grid import Column
from duat_cli.results.base import Environment, ModelFacts, Result, Skipped
from duat_cli.results.prompts import Prompts


@dataclass(frozen=True)
class Figure:
    """A picture with its texts and tables."""

    key: str
    """Name among the figures of its sheet; figures of several sheets with the same key are side by side."""
    title: str
    """Title: what the picture shows."""
    says: str
    """How to read it, one or two sentences."""
    tables: Sequence[Table]
    """The numbers behind the picture."""
    picture: Markup = field(default_factory=Markup)
    """The picture; empty if there are only tables."""
    terms: Sequence[str] = ()
    """Paths of the fields shown, such as 'blocks[].terms.linear'; their definitions are linked."""
    legend: Sequence[Sample] = ()
    notes: Sequence[str] = ()
    """Notes on what the picture leaves out, and why."""
    opened: bool = False
    """Whether tables are open at first, although there is a picture."""
    half: bool = False
    """Whether another figure fits beside it."""
    name: str = ""
    """Name in the page's contents; if empty, the title up to a colon or comma."""

    @property
    def samples(self) -> Markup:
        return legend(self.legend)

    @property
    def called(self) -> str:
        """The figure's name in the page's contents."""
        return self.name or self.title.partition(":")[0].partition(",")[0]

    @property
    def unfolded(self) -> bool:
        """Whether the tables are open at first."""
        return self.opened or not self.picture


@dataclass(frozen=True)
class Verdict:
    """The verdict at the top of a sheet. state: good, bad or open; the words say the same."""

    state: Literal["good", "bad", "open"]
    word: str
    text: str


@dataclass(frozen=True)
class Tile:
    """A leading number. path: its path in the report, such as 'ways.0.peak_memory_bytes'."""

    name: str
    value: str
    unit: str
    path: str

    @property
    def field(self) -> str:
        """The field of the report, such as 'ways[].peak_memory_bytes'."""
        return field_of(self.path)


@dataclass(frozen=True)
class Sheet:
    """The sheet of one report."""

    command: str
    name: str
    """Name of the model."""
    verdict: Verdict | None
    facts: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    """Titled lists of sentences: what is notable, what was skipped, warnings. Empty ones are left out."""
    figures: Sequence[Figure] = ()


def sheet_of(
    report: Any,
    prompts: Prompts,
    tiles: Sequence[Tile],
    lists: Sequence[tuple[str, Sequence[str]]],
    figures: Iterable[Figure | None],
    *,
    more: Sequence[str] = (),
    said: Verdict | None = None,
    of: str = "",
) -> Sheet:
    """The sheet of a report on a model under prompts. lists: put before the lists of skipped parts and warnings. more:
    facts beside those of the model. said: the verdict, if it is not that of the certificate alone. of: words for the
    part of the model that it is about."""
    return Sheet(
        command=report.command,
        name=facts.named(report.model) + of,
        facts=[*loaded(report.model, report.environment, prompts), *more],
        verdict=said or verdict_of(facts.verdict(report.certificate), exact=report.certificate.exact),
        tiles=tiles,
        lists=[*lists, skipped(getattr(report, "skipped", ())), ("Warnings", report.warnings)],
        figures=[figure for figure in figures if figure is not None],
    )


def tiles_of(report: Result, columns: Iterable[Column]) -> list[Tile]:
    """Tiles for those numbers that the report has."""
    known = (column for column in columns if column.value(report) is not None)
    return [Tile(column.name, column.cell(report), column.title[-1], column.path) for column in known]


def loaded(model: ModelFacts, environment: Environment, prompts: Prompts) -> list[str]:
    """Facts on the model, the prompts, and the arithmetic."""
    return [facts.shape(model, "key/value"), facts.ran(prompts, environment)]


def noted(count: int, what: str) -> list[str]:
    """A note on `count` left-out items; nothing if there are none."""
    return [f"{count} {what}"] if count > 0 else []


def verdict_of(said: Text, *, exact: bool) -> Verdict:
    """The verdict from a table's line on a certificate."""
    word, _, text = said.plain.partition(": ")
    return Verdict("good" if exact else "bad", word, text)


def skipped(entries: Sequence[Skipped]) -> tuple[str, list[str]]:
    return "Skipped", facts.left_out(entries)
