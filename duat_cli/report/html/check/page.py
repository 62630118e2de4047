"""The sheet of `duat check`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.check.words import against, looked_at, verdict
from duat_cli.report.html.check.bounds import bounds
from duat_cli.report.html.check.drift import drift
from duat_cli.report.html.check.findings import causes, every
from duat_cli.report.html.drawing.facts import tiles
from duat_cli.report.html.drawing.figure import Figure, Sheet, Verdict
from duat_cli.report.html.drawing.table import Head, Table
from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.check import CheckReport, UndecidedReport

_TILES = (
    *(Column((status, ""), f"counts.{status}", numbers.whole) for status in ("failed", "warned", "passed", "skipped")),
    Column(("certificate", "relative"), "certificate.relative_error", numbers.error),
    Column(("loss", "nats/token"), "behaviour.loss_per_token", numbers.plain),
    Column(("null: uniform", "nats/token"), "behaviour.uniform", numbers.plain),
    Column(("null: unigram", "nats/token"), "behaviour.unigram", numbers.plain),
    Column(("entropy", "nats/token"), "behaviour.entropy", numbers.plain),
    Column(("same predictions as the baseline", "%"), "behaviour.agreement", numbers.percent),
    Column(("cosine to the baseline", ""), "behaviour.cosine", numbers.plain),
)


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
        tiles=tiles(report, _TILES),
        lists=[("Turned off", [", ".join(report.off)] if report.off else []), ("Warnings", report.warnings)],
        figures=[figure for figure in figures if figure is not None],
    )


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
