"""The sheet of `duat check`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.check.words import against, looked_at, verdict
from duat_cli.report.html.check.bounds import bounds
from duat_cli.report.html.check.drift import drift
from duat_cli.report.html.check.findings import causes, every
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, Verdict
from duat_cli.report.html.drawing.table import Head, Table
from duat_cli.report.tables import facts, numbers
from duat_cli.results.behaviour import Behaviour
from duat_cli.results.check import CheckReport, UndecidedReport


def check_sheet(report: CheckReport | UndecidedReport, beside: Sequence[CheckReport | UndecidedReport]) -> Sheet:
    """What failed first, then how far. beside: of no matter."""
    if isinstance(report, UndecidedReport):
        return Sheet(report.command, report.model or "demo", Verdict("open", "COULD NOT TELL", report.error.message))
    figures = [*causes(report), drift(report), bounds(report), _changes(report), every(report)]
    word, _, text = verdict(report).partition(": ")
    return Sheet(
        command=report.command,
        name=facts.named(report.model),
        facts=[*looked_at(report), *([against(report.baseline)] if report.baseline is not None else [])],
        verdict=Verdict("good" if report.verdict == "passed" else "bad", word, text),
        tiles=_tiles(report),
        lists=[("Turned off", [", ".join(report.off)] if report.off else []), ("Warnings", report.warnings)],
        figures=[figure for figure in figures if figure is not None],
    )


def _tiles(report: CheckReport) -> list[Tile]:
    names = ("failed", "warned", "passed", "skipped")
    found = [Tile(name, str(getattr(report.counts, name)), "", f"counts.{name}") for name in names]
    if report.certificate is not None:
        error = numbers.error(report.certificate.relative_error)
        found.append(Tile("certificate", error, "relative", "certificate.relative_error"))
    return [*found, *(_behaviour(report.behaviour) if report.behaviour else [])]


def _behaviour(found: Behaviour) -> list[Tile]:
    """What the model answers, beside what no knowledge gives."""
    plain, percent = numbers.plain, numbers.percent
    tiles = [
        Tile("loss", plain(found.loss_per_token), "nats/token", "behaviour.loss_per_token"),
        Tile("null: uniform", plain(found.uniform), "nats/token", "behaviour.uniform"),
        Tile("null: unigram", plain(found.unigram), "nats/token", "behaviour.unigram"),
        Tile("entropy", plain(found.entropy), "nats/token", "behaviour.entropy"),
        Tile("same predictions as the baseline", percent(found.agreement), "%", "behaviour.agreement"),
        Tile("cosine to the baseline", plain(found.cosine), "", "behaviour.cosine"),
    ]
    return [tile for tile in tiles if tile.value != numbers.ABSENT]


def _changes(report: CheckReport) -> Figure | None:
    """What --update-baseline wrote."""
    if report.baseline is None or not report.baseline.changes:
        return None
    changes = report.baseline.changes
    return Figure(
        key="changes",
        wide=True,
        title="What changed in the baseline",
        says=f"{report.baseline.file}: {report.baseline.status}.",
        tables=[
            Table(
                heads=[Head("entry", number=False), Head("before", number=False), Head("now", number=False)],
                rows=[[one.key, one.old or "absent", one.new or "gone"] for one in changes],
            )
        ],
        terms=["baseline.changes"],
    )
