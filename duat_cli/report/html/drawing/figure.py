"""What a page is made of: per report a sheet with its facts, verdict, leading numbers and figures."""

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
    """A picture and all that belongs to it."""

    key: str
    """Names it among the figures of its sheet; figures of one key stand side by side."""
    title: str
    """What the picture shows."""
    says: str
    """How to read it, one or two sentences."""
    tables: Sequence[Table]
    """The numbers behind the picture."""
    picture: Markup = field(default_factory=Markup)
    """Empty where the tables are all there is to see."""
    terms: Sequence[str] = ()
    """Paths of the fields it shows, such as 'blocks[].terms.linear'; their definitions are linked."""
    legend: Sequence[Sample] = ()
    notes: Sequence[str] = ()
    """What the picture leaves out, and why."""
    opened: bool = False
    """Whether its tables are seen without being opened, though there is a picture."""
    half: bool = False
    """Whether another one has room beside it."""
    name: str = ""
    """In the page's contents; where it is empty, the title up to a colon or comma."""

    @property
    def samples(self) -> Markup:
        return legend(self.legend)

    @property
    def called(self) -> str:
        """Its name in the page's contents."""
        return self.name or self.title.partition(":")[0].partition(",")[0]

    @property
    def unfolded(self) -> bool:
        """Whether its tables are seen without being opened."""
        return self.opened or not self.picture


@dataclass(frozen=True)
class Verdict:
    """What stands on top. state: good, bad or open; the words say it as well."""

    state: Literal["good", "bad", "open"]
    word: str
    text: str


@dataclass(frozen=True)
class Tile:
    """A leading number. path: where it stands in the report, such as 'ways.0.peak_memory_bytes'."""

    name: str
    value: str
    unit: str
    path: str

    @property
    def field(self) -> str:
        """Of the report, such as 'ways[].peak_memory_bytes'."""
        return field_of(self.path)


@dataclass(frozen=True)
class Sheet:
    """One report."""

    command: str
    name: str
    """What it is about: the model."""
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
    """Of a report on a model under prompts. lists: those in front of what was skipped and of the warnings. more: facts
    beside those of the model. said: the verdict, where it is not of the certificate alone. of: which part of the
    model it is about."""
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
    """Of those numbers that the report has."""
    known = (column for column in columns if column.value(report) is not None)
    return [Tile(column.name, column.cell(report), column.title[-1], column.path) for column in known]


def loaded(model: ModelFacts, environment: Environment, prompts: Prompts) -> list[str]:
    """What was loaded, what ran, and with which arithmetic."""
    return [facts.shape(model, "key/value"), facts.ran(prompts, environment)]


def noted(count: int, what: str) -> list[str]:
    """A note on so many that are not there; nothing where there are none."""
    return [f"{count} {what}"] if count > 0 else []


def verdict_of(said: Text, *, exact: bool) -> Verdict:
    """What a table says of a certificate."""
    word, _, text = said.plain.partition(": ")
    return Verdict("good" if exact else "bad", word, text)


def skipped(entries: Sequence[Skipped]) -> tuple[str, list[str]]:
    return "Skipped", facts.left_out(entries)
