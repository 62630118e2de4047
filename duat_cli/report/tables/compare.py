"""`duat compare` as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from duat_cli.report.tables import facts, numbers, patching
from duat_cli.report.tables.grid import BLOCK, Column, Labels, missing, of_cross, titled
from duat_cli.report.tables.numbers import SIGNED
from duat_cli.report.tables.page import BLANK, Page, cut, heading, item, note
from duat_cli.results.compare.report import (
    AlignedRun,
    BlockComparison,
    CompareReport,
    InContext,
    InputComparison,
    PairFacts,
)
from duat_cli.text import first_of, plural

_SHOWN_PAIRS = 8
_SHOWN_RUNS = 6
_LONGEST_RUN = 60
_PARAMETER = Labels(("set by the input",), lambda row: f"{row.name}: {row.what}", False)
BLOCK_COLUMNS = [
    Column(("W'", "%"), "operator.relative", numbers.percent, ("change of W'", "%")),
    Column(("rout\N{SOFT HYPHEN}", "ing", "%"), "operator.routing", numbers.percent),
    Column(("scale", "%"), "operator.scale", numbers.percent),
    Column(("inter\N{SOFT HYPHEN}", "action", "%"), "operator.interaction", numbers.percent),
    Column(("null", "W'", "%"), "operator.null.relative", numbers.percent, ("null: uniform attention", "%")),
    Column(("unal.", "%"), "operator.unaligned", numbers.percent, ("on unaligned tokens", "%")),
    Column(("null", "unal.", "%"), "operator.null.unaligned", numbers.percent, ("null: uniform attention", "%")),
    Column(("bias", "b'", "%"), "bias", numbers.percent),
    Column(("FFN", "f", "%"), "ffn", numbers.percent),
    Column(("out\N{SOFT HYPHEN}", "put", "%"), "output", numbers.percent),
    Column(("ampl.", "times"), "amplification", numbers.plain, ("amplification", "times")),
]
CROSS_COLUMNS = [
    Column(("W'_c", "%"), "cross.relative", numbers.percent, ("change of W'_c", "%")),
    *of_cross(BLOCK_COLUMNS[1:7]),
]
_CROSS_LEGEND = (
    "W'_c: cross-attention as one matrix, from the encoder's tokens to the decoder's. unal.: share of it that reads "
    "tokens of the encoder without a partner in the other prompt."
)
_LEGEND = (
    "W': |W'_b - W'_a| / |W'_a|. routing (H alone) + scale (norms and gates) + interaction add up to the difference as "
    "matrices; their norms need not. unal.: share of W' that reads tokens without a partner. null: the same with "
    "uniform attention, so what positions and scales alone make.",
    "bias: b'_{j,2}, all that the FFN's nonlinearity reads beside the linear path from x_0. ampl.: change of the "
    "block's output over that of its input. Heads one by one: --json.",
)
_PARAMETER_COLUMNS = [Column(("largest", "change", "%"), "change", numbers.percent)]
_RUN = Labels(("question behind",), lambda row: row.label, False)
RUN_COLUMNS = [
    Column(("loss", "nats/token"), "loss", numbers.plain, ("loss of the answer", "nats a token")),
    Column(("less that", "without", "nats/token"), "loss_change", SIGNED, ("less that without", "nats a token")),
    Column(("bias", "b'", "%"), "bias", numbers.percent, ("change of b'", "%")),
]
_READ = Labels(("--prefix",), lambda row: row.demonstration)
READ_COLUMNS = [
    Column(("W'", "reads", "%"), "share", numbers.percent),
    Column(("null", "reads", "%"), "null", numbers.percent, ("null: uniform attention", "%")),
]
_HELD = Labels(("held",), lambda row: f"{row.held}: {row.source}", False)
HELD_COLUMNS = [
    Column(("loss", "nats/token"), "loss", numbers.plain, ("loss", "nats a token")),
    Column(("less live", "nats/token"), "change", SIGNED, ("less live", "nats a token")),
    Column(("low", "nats/token"), "low", SIGNED, ("interval, from", "nats a token")),
    Column(("high", "nats/token"), "high", SIGNED, ("interval, to", "nats a token")),
]
TABLES = {
    **patching.TABLES,
    "fixed.runs[].": HELD_COLUMNS,
    "context.runs[].": RUN_COLUMNS,
    "context.runs[].reads[].": READ_COLUMNS,
    "context.runs[].reads[].blocks[].": READ_COLUMNS,
    "comparison.blocks[].": [*BLOCK_COLUMNS, *CROSS_COLUMNS],
    "comparison.parameters[].": _PARAMETER_COLUMNS,
}


def render_compare(report: CompareReport, page: Page) -> str:
    """The report as text: what was compared or held, the certificate, what is notable."""
    found = report.comparison
    return page.render(
        *facts.loaded(report.model, report.prompts, report.environment),
        *(_fixed(report, page) if found is None else _compared(report, found, page)),
        facts.verdict(report.certificate),
        *facts.section("notable", [] if found is None else found.notable),
        *facts.remarks(report.skipped, report.warnings),
    )


def _compared(report: CompareReport, found: InputComparison, page: Page) -> list[RenderableType]:
    """The aligned tokens, a row per block, and the parameters that moved."""
    several = ", means over the pairs" if len(report.pairs) > 1 else ""
    title = f"Blocks: relative changes on the aligned tokens{several}"
    return [
        *_pairs(report),
        *facts.whole(title, found.blocks, BLOCK, BLOCK_COLUMNS, page, *_LEGEND),
        *_crosses(found.blocks, page),
        *_each(report, page),
        *([] if report.context is None else context_tables(report.context, page)),
        *([] if report.patched is None else patching.patches(report.patched, page)),
        *_parameters(found, page),
        BLANK,
    ]


def _crosses(blocks: Sequence[BlockComparison], page: Page) -> list[RenderableType]:
    """The table of cross-attention, in a decoder."""
    known = [block for block in blocks if block.cross is not None]
    title = "Cross-attention: relative changes on the aligned tokens"
    return facts.whole(title, known, BLOCK, CROSS_COLUMNS, page, _CROSS_LEGEND) if known else []


def _fixed(report: CompareReport, page: Page) -> list[RenderableType]:
    found = report.fixed
    if found is None:
        return []
    error, limit = numbers.error(found.own_error), f"{found.tolerance:.0e}"
    check = f"own values give back the live loss: largest difference {error}, tolerance {limit}"
    title = f"Loss with dynamic parameters held; live {numbers.plain(found.live)} nats a token"
    legend = "less live: mean over the prompts, with a 95 % interval over them (low, high). sigma stays live."
    return [*facts.whole(title, found.runs, _HELD, HELD_COLUMNS, page, legend), facts.held(check, found.holds)]


def _pairs(report: CompareReport) -> list[RenderableType]:
    """The tokens that were compared, and the divergence of the predictions, by pair."""
    parts: list[RenderableType] = []
    for pair in report.pairs[:_SHOWN_PAIRS]:
        parts += [BLANK, heading(_pair(pair, report)), *_runs(pair)]
        parts += [note(f"no KL: {pair.reasons['kl']}")] if pair.kl is None else []
    more = len(report.pairs) - _SHOWN_PAIRS
    return [*parts, *([note(f"and {plural(more, 'more pair')}")] if more > 0 else [])]


def _pair(pair: PairFacts, report: CompareReport) -> str:
    a, b = report.prompts[pair.a], report.prompts[pair.b]
    divergence = "" if pair.kl is None else f"; KL of the prediction {numbers.plain(pair.kl)} nats"
    return (
        f"a: {a.label} ({plural(a.tokens, 'token')}), b: {b.label} ({plural(b.tokens, 'token')}): "
        f"{pair.aligned} aligned{divergence}"
    )


def _runs(pair: PairFacts) -> list[RenderableType]:
    runs = [f"a {_places(run.a, run.tokens)} {_beside(run)}" for run in pair.runs]
    return [item(text) for text in first_of(runs, _SHOWN_RUNS, "more, see --json")]


def _beside(run: AlignedRun) -> str:
    there = f"b {_places(run.b, run.tokens)}"
    if run.text_b is None:
        return f"= {there}: '{cut(run.text, _LONGEST_RUN)}'"
    return f"beside {there}: '{cut(run.text, _LONGEST_RUN)}' and '{cut(run.text_b, _LONGEST_RUN)}'"


def _places(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _each(report: CompareReport, page: Page) -> list[RenderableType]:
    """The table of blocks for every single pair, with --per-prompt."""
    parts: list[RenderableType] = []
    for pair in report.pairs:
        if pair.blocks is not None:
            title = f"a: {report.prompts[pair.a].label}, b: {report.prompts[pair.b].label}"
            parts += [*facts.whole(title, pair.blocks, BLOCK, BLOCK_COLUMNS, page), *_crosses(pair.blocks, page)]
    return parts


def context_tables(found: InContext, page: Page) -> list[RenderableType]:
    """The loss with no, each and all demonstrations; then how much the last run reads each, as mean and by block."""
    question, answer = (plural(n, "token") for n in (found.question_tokens, found.answer_tokens))
    last = found.runs[-1]
    runs_title = f"Demonstrations: loss of the answer ({answer}) behind the question ({question})"
    reads_title = f"{last.label}: how much of W' on the question reads each demonstration, mean over blocks"
    legend = "bias: how far they move b'_{j,2} on the question. null: the same with uniform attention."
    parts: list[RenderableType] = [
        *titled(runs_title, found.runs, _RUN, RUN_COLUMNS, page),
        *facts.absences(missing(found.runs, RUN_COLUMNS, [run.prompt for run in found.runs]), "prompt"),
        *titled(reads_title, last.reads, _READ, READ_COLUMNS, page, legend),
    ]
    for read in last.reads:
        title = f"--prefix {read.demonstration} by block, {plural(read.tokens, 'token')}"
        parts += facts.whole(title, read.blocks, BLOCK, READ_COLUMNS, page)
    return parts


def _parameters(comparison: InputComparison, page: Page) -> list[RenderableType]:
    """The largest change of each parameter that the input sets, and the names of those that are fixed."""
    fixed = [f"{one.name}: {one.what}" for one in comparison.parameters if one.set_by == "checkpoint"]
    moved = [one for one in comparison.parameters if one.set_by == "input"]
    over = "blocks and pairs" if comparison.pairs > 1 else "blocks"
    title = f"Parameters of the sum, and the largest change over {over}"
    return [
        *titled(title, moved, _PARAMETER, _PARAMETER_COLUMNS, page),
        BLANK,
        *facts.section("fixed, set by the checkpoint", fixed),
    ]
