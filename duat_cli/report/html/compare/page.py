"""The sheet of `duat compare`: the prompts, the parameters, and the effect of parameters that move with the input."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.compare.blocks import by_pair, figures_of_blocks, named
from duat_cli.report.html.compare.patching import patches
from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import across, lines, meanings, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, sheet_of, tiles_of
from duat_cli.report.html.drawing.plot import Axis, Plot, level
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.table import Head, table_by, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.compare import HELD_COLUMNS, READ_COLUMNS, RUN_COLUMNS
from duat_cli.report.tables.grid import Column, on_page
from duat_cli.results.compare.report import CompareReport, FixedLoss, PairFacts
from duat_cli.text import plural, some

_TILES = (
    Column(("certificate", "relative"), "certificate.relative_error", numbers.error),
    Column(("live loss", "nats a token"), "fixed.live", numbers.plain),
    Column(("pairs", ""), "comparison.pairs", numbers.whole),
)
_RUNS = 6  # how many aligned runs of a pair are shown
_FIXED, _CONTEXT, _READ = on_page(HELD_COLUMNS), on_page(RUN_COLUMNS), on_page(READ_COLUMNS)
_SOURCES = {"own": "the prompt's own", "another prompt": "another prompt's", "mean": "the mean over the prompts"}
_APART = 0.16  # distance, in bands, between marks for what is held
_DEMONSTRATIONS = 5  # how many demonstrations have a line of their own


def compare_sheet(report: CompareReport, beside: Sequence[CompareReport]) -> Sheet:
    figures = [_fixed(report, beside), _answer(report, beside), _reads(report), *figures_of_blocks(report, beside)]
    figures += [patches(report), by_pair(report), _pairs(report), _parameters(report)]
    notable = [] if report.comparison is None else report.comparison.notable
    return sheet_of(report, report.prompts, _tiles(report), [("Notable", notable)], figures)


def _tiles(report: CompareReport) -> list[Tile]:
    found = tiles_of(report, _TILES)
    if len(report.pairs) == 1:
        pair = report.pairs[0]
        found.append(Tile("aligned", str(pair.aligned), "tokens", "pairs.0.aligned"))
        found.append(Tile("KL of the prediction", numbers.plain(pair.kl), "nats", "pairs.0.kl"))
    return found


def _fixed(report: CompareReport, beside: Sequence[CompareReport]) -> Figure | None:
    found = report.fixed
    if found is None:
        return None
    every = [v for r in beside if r.fixed for one in r.fixed.runs for v in (one.change, one.low, one.high)]
    sources = list(dict.fromkeys(run.source for run in found.runs))
    kinds = list(dict.fromkeys(run.held for run in found.runs))
    plot = Plot(
        Axis("whose values are held", Band([_SOURCES[source] for source in sources])),
        Axis("loss less the live one (nats a token)", Linear.over(every)),
        height=300,
    )
    drawn = [level(plot, 0.0, f"live: {numbers.plain(found.live)} nats a token")]
    for run in found.runs:
        kind = kinds.index(run.held)
        x, series = plot.x(sources.index(run.source) + (kind - (len(kinds) - 1) / 2) * _APART), marks.SERIES[kind]
        if run.low is not None and run.high is not None:
            drawn.append(marks.span(x, plot.y(run.low), x, plot.y(run.high), series))
        if run.change is not None:
            text = f"{_held(run)}: {numbers.SIGNED(run.change)}, loss {numbers.plain(run.loss)}"
            drawn.append(marks.dot(x, plot.y(run.change), series, text, size=5))
    entries = [("dot", series, kind) for kind, series in zip(kinds, marks.SERIES, strict=False)]
    error, tolerance = numbers.error(found.own_error), f"{found.tolerance:.0e}"
    check = f"its own values give back the live loss to {error}, tolerance {tolerance}"
    return Figure(
        key="fixed",
        title="What dynamic parameters buy: the loss with them held, against the live one",
        says=f"The dashed line is the live model, {numbers.plain(found.live)} nats a token. Held at the prompt's own "
        "values nothing may change; the FFNs' nonlinearity stays live throughout.",
        picture=plot.svg(drawn, "A point with its interval for each way to hold parameters; a line at the live loss."),
        tables=[table_of(found.runs, Head("held", number=False), _held, _FIXED, "fixed.runs[]")],
        terms=["fixed.runs[].change", "fixed.runs[].loss", "fixed.runs[].held", "fixed.runs[].source", "fixed.live",
               "fixed.own_error"],
        legend=[*entries, ("span", "s1", "95 % interval over the prompts"), ("rule", "s1", "live")],
        notes=[f"Holds: {check}." if found.holds else f"DOES NOT HOLD: {check}."],
    )  # fmt: skip


def _held(run: FixedLoss) -> str:
    return f"{run.held}: {run.source}"


def _answer(report: CompareReport, beside: Sequence[CompareReport]) -> Figure | None:
    found = report.context
    if found is None or all(run.loss is None for run in found.runs):
        return None
    every = [run.loss for r in beside if r.context for run in r.context.runs]
    plot = Plot(
        Axis("in front of the answer", Band([run.label for run in found.runs], most=10)),
        Axis("loss of the answer (nats a token)", Linear.over(every, zero=False)),
        height=280,
    )
    alone = found.runs[0].loss
    drawn = []
    if alone is not None:
        drawn.append(level(plot, alone, f"without demonstrations: {numbers.plain(alone)}"))
    for place, run in enumerate(found.runs):
        if run.loss is not None:
            text = f"{run.label}: {numbers.plain(run.loss)} nats a token"
            drawn.append(marks.dot(plot.x(place), plot.y(run.loss), "s1", text, size=5))
    question, words = (plural(n, "token") for n in (found.question_tokens, found.answer_tokens))
    return Figure(
        key="answer",
        title="What demonstrations do to the answer: its loss by context",
        says=f"The answer ({words}) behind the question ({question}) with none, each and all of the demonstrations; "
        "below the dashed line they help.",
        picture=plot.svg(drawn, "A point for each context, and a line at the loss without demonstrations."),
        tables=[table_of(found.runs, Head("context", number=False), lambda run: run.label, _CONTEXT, "context.runs[]")],
        terms=["context.runs[].loss", "context.runs[].loss_change", "context.runs[].bias"],
    )


def _reads(report: CompareReport) -> Figure | None:
    """A plot over blocks of how much of W' on the question reads each demonstration, in the run with all of them."""
    runs = [] if report.context is None else report.context.runs
    if not runs or not runs[-1].reads or not runs[-1].reads[0].blocks:
        return None
    last, number = runs[-1], len(runs) - 1
    kept = last.reads[:_DEMONSTRATIONS]
    every = [v for read in kept for block in read.blocks for v in (block.share, block.null)]
    plot = Plot(across(kept[0].blocks), Axis("share of W' on the question (%)", Linear.over(every, percent=True)))
    drawn, entries = [], []
    for series, read in zip(marks.SERIES, kept, strict=False):
        name = f"--prefix {read.demonstration}"
        both = [("share", series, name), ("null", series, f"{name}, uniform attention")]
        drawn += lines(plot, read.blocks, both, numbers.share)
        entries += meanings("line", both)
    left = len(last.reads) - len(kept)
    tables = [
        table_of_blocks(
            read.blocks, _READ, f"context.runs.{number}.reads.{place}.blocks[]", f"--prefix {read.demonstration}, block"
        )
        for place, read in enumerate(kept)
    ]
    return Figure(
        key="reads",
        title=f"How much of W' on the question reads each demonstration: {last.label}",
        says="Hollow: the same share with uniform attention, so what length, mask and scales alone make.",
        picture=plot.svg(drawn, "Two lines over blocks for each demonstration: this model, and uniform attention."),
        tables=tables,
        terms=["context.runs[].reads[].blocks[].share", "context.runs[].reads[].blocks[].null"],
        legend=entries,
        notes=[f"{plural(left, 'more demonstration')}: in the JSON."] if left > 0 else [],
    )


def _pairs(report: CompareReport) -> Figure | None:
    if not report.pairs:
        return None
    return Figure(
        key="pairs",
        title="Which prompts were compared, and on which tokens",
        says="Aligned are the tokens that both have, in one order, or with --align position those at one place (a | b "
        "where they differ); KL is of what is predicted behind each prompt.",
        tables=[
            table_by(
                "pairs[]",
                report.pairs,
                (Head("pair", number=False), lambda pair: named(report, pair)),
                Column(("aligned", "tokens"), "aligned", numbers.whole),
                Column(("KL of the prediction", "nats"), "kl", numbers.plain),
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
    texts = [run.text if run.text_b is None else f"{run.text} | {run.text_b}" for run in pair.runs]
    return some(texts, _RUNS, " / ", " / and ")


def _parameters(report: CompareReport) -> Figure | None:
    if report.comparison is None:
        return None
    return Figure(
        key="parameters",
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
