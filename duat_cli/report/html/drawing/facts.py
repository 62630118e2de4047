"""What the sheets of most commands have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, Verdict
from duat_cli.report.tables import facts
from duat_cli.report.tables.grid import Column
from duat_cli.results.base import Certificate, Environment, ModelFacts, Result, Skipped
from duat_cli.results.prompts import Prompts


def sheet(
    report: Any,
    prompts: Prompts,
    tiles: Sequence[Tile],
    lists: Sequence[tuple[str, Sequence[str]]],
    figures: Iterable[Figure | None],
    *,
    more: Sequence[str] = (),
    said: Verdict | None = None,
) -> Sheet:
    """Of a report on a model under prompts. lists: those in front of what was skipped and of the warnings. more: facts
    beside those of the model. said: the verdict, where it is not of the certificate alone."""
    return Sheet(
        command=report.command,
        name=facts.named(report.model),
        facts=[*loaded(report.model, report.environment, prompts), *more],
        verdict=said or verdict(report.certificate),
        tiles=tiles,
        lists=[*lists, skipped(report.skipped), ("Warnings", report.warnings)],
        figures=[figure for figure in figures if figure is not None],
    )


def tiles(report: Result, columns: Iterable[Column]) -> list[Tile]:
    """Of those numbers that the report has."""
    known = (column for column in columns if column.value(report) is not None)
    return [Tile(column.name, column.cell(report), column.title[-1], column.path) for column in known]


def loaded(model: ModelFacts, environment: Environment, prompts: Prompts) -> list[str]:
    """What was loaded, what ran, and with which arithmetic."""
    return [facts.shape(model, "key/value"), facts.ran(prompts, environment)]


def verdict(certificate: Certificate) -> Verdict:
    """The certificate in words."""
    word, _, text = facts.verdict(certificate).plain.partition(": ")
    return Verdict("good" if certificate.exact else "bad", word, text)


def skipped(entries: Sequence[Skipped]) -> tuple[str, list[str]]:
    return "Skipped", facts.left_out(entries)
