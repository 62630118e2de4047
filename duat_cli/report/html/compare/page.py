"""The sheet of `duat compare`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.compare.blocks import (
    amplification,
    blocks_of,
    by_pair,
    heads,
    named,
    operator,
    stream,
    unaligned,
)
from duat_cli.report.html.compare.losses import answer, fixed, reads
from duat_cli.report.html.drawing import facts
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile
from duat_cli.report.html.drawing.table import Head, table_by
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.compare import CompareReport, PairFacts

_RUNS = 6  # aligned stretches of a pair that the page shows


def compare_sheet(report: CompareReport, beside: Sequence[CompareReport]) -> Sheet:
    """beside: all compare reports of the page, this one among them: they share their axes."""
    blocks = blocks_of(report)
    figures = [fixed(report, beside), answer(report, beside), reads(report)]
    if blocks:
        figures += [operator(blocks, beside), *heads(blocks)]
        figures += [amplification(blocks, beside), stream(blocks, beside), unaligned(blocks, beside)]
    figures += [by_pair(report), _pairs(report), _parameters(report)]
    notable = [] if report.comparison is None else report.comparison.notable
    return facts.sheet(report, report.prompts, _tiles(report), [("Notable", notable)], figures)


def _tiles(report: CompareReport) -> list[Tile]:
    found = [Tile("certificate", numbers.error(report.certificate.relative_error), "relative",
                  "certificate.relative_error")]  # fmt: skip
    if report.fixed is not None:
        found.append(Tile("live loss", numbers.plain(report.fixed.live), "nats a token", "fixed.live"))
    if report.comparison is not None:
        found.append(Tile("pairs", str(report.comparison.pairs), "", "comparison.pairs"))
    if len(report.pairs) == 1:
        pair = report.pairs[0]
        found.append(Tile("aligned", str(pair.aligned), "tokens", "pairs.0.aligned"))
        found.append(Tile("KL of the next token", numbers.plain(pair.kl), "nats", "pairs.0.kl"))
    return found


def _pairs(report: CompareReport) -> Figure | None:
    """Which tokens were compared."""
    if not report.pairs:
        return None
    return Figure(
        key="pairs",
        wide=True,
        title="Which prompts were compared, and on which tokens",
        says="Aligned are the tokens that both have, in one order, or with --align position those at one place (a | b "
        "where they differ); KL is of the next token behind each prompt.",
        tables=[
            table_by(
                "pairs[]",
                report.pairs,
                (Head("pair", number=False), lambda pair: named(report, pair)),
                Column(("aligned", "tokens"), "aligned", numbers.whole),
                Column(("KL of the next token", "nats"), "kl", numbers.plain),
                (Head("the aligned text", number=False, long=True), _aligned),
                notes=[
                    f"No KL: {reason}."
                    for reason in dict.fromkeys(p.reasons.get("kl", "not known") for p in report.pairs if p.kl is None)
                ],
            )
        ],
        terms=["pairs[].runs"],
    )


def _aligned(pair: PairFacts) -> str:
    left = len(pair.runs) - _RUNS
    texts = [run.text if run.text_b is None else f"{run.text} | {run.text_b}" for run in pair.runs[:_RUNS]]
    return " / ".join(texts) + (f" / and {left} more" if left > 0 else "")


def _parameters(report: CompareReport) -> Figure | None:
    if report.comparison is None:
        return None
    return Figure(
        key="parameters",
        wide=True,
        title="Which parameters of the sum are fixed, and which move with the input",
        says="The largest change over blocks and pairs; what the checkpoint sets does not move.",
        tables=[
            table_by(
                "comparison.parameters[]",
                report.comparison.parameters,
                (Head("parameter", number=False), lambda row: row.name),
                (Head("what it is", path="what", number=False, long=True), lambda row: row.what),
                (Head("set by", path="set_by", number=False), lambda row: row.set_by),
                Column(("largest change", "%"), "change", numbers.percent),
            )
        ],
        terms=["comparison.parameters[].change"],
    )
