"""`duat prune-bound` as text for a terminal: result in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import Column, Labels, fits, grids, missing, unshown
from duat_cli.report.tables.page import Page, item, line
from duat_cli.results.prune import Plan, Prediction, PruneBlock, PruneReport

_BLANK = Text("")
_BLOCK = Labels(("block",), lambda row: str(row.index) if isinstance(row, PruneBlock) else "")
_KIND = Labels(("what",), lambda row: row.granularity if isinstance(row, Plan | Prediction) else "", False)
PICTURE_WIDTH = 40
NAMED_TERMS = 12  # a longer set is not printed
_SHORT = {"hidden": "rel.", "kl": "nats", "nll": "nats"}  # units, for headers


def render_prune(report: PruneReport, page: Page) -> str:
    """What was loaded, predicted damage a block, the largest sets within the budget, how good the prediction was."""
    parts: list[RenderableType] = [
        *facts.loaded(report.model, report.prompts, report.environment),
        line(f"damage: {report.protocol.meaning}; a removed term is {_stand_in(report)}", "dim"),
        *_blocks(report, page),
        *_plans(report, page),
        *_pictures(report, page),
        *_predictions(report, page),
        _BLANK,
        facts.verdict(report.certificate),
        *facts.remarks(report),
    ]
    return page.render(parts)


def _stand_in(report: PruneReport) -> str:
    return "set to zero" if report.protocol.ablate == "zero" else "set to its mean over the prompts"


# -- blocks --------------------------------------------------------------------------------------------------


def _blocks(report: PruneReport, page: Page) -> list[RenderableType]:
    return [*_parts(report, page), *_heads_and_neurons(report, page)]


def _parts(report: PruneReport, page: Page) -> list[RenderableType]:
    """Whole blocks, attentions and FFNs: what is measured beside what was predicted."""
    columns, optional = _part_columns(_SHORT[report.protocol.metric]), _certified_columns()
    rows = report.blocks
    shown = _filled(rows, columns)
    if not shown:
        return []
    wanted = [*shown, *optional]
    for column in _filled(rows, optional):
        if fits(rows, _BLOCK, [*shown, column], page):
            shown.append(column)
    return [
        _BLANK,
        line(f"Damage of removing one whole part, {report.protocol.unit}: predicted, and really ablated", "bold"),
        *(part for table in grids(rows, _BLOCK, shown, page) for part in (_BLANK, table)),
        *unshown(rows, wanted, shown),
        _BLANK,
        *_far_off(report),
        *_certified(report, shown),
        *facts.absences(missing(rows, shown, [row.index for row in rows]), "block"),
    ]


def _part_columns(unit: str) -> list[Column]:
    return [
        Column((name, kind, unit), field + suffix, numbers.plain)
        for name, field in _PARTS
        for kind, suffix in (("pred.", ""), ("meas.", "_measured"))
    ]


def _certified_columns() -> list[Column]:
    return [
        Column(("certified", "attention", "x stream"), "certified_attention_relative", numbers.plain),
        Column(("certified", "FFN", "x stream"), "certified_ffn_relative", numbers.plain),
    ]


_PARTS = (("block", "block"), ("attention", "attention"), ("FFN", "ffn"))
FAR_OFF = 2.0  # a factor


def _far_off(report: PruneReport) -> list[RenderableType]:
    """The part whose prediction is furthest from its ablation, if it is far."""
    worst, where = FAR_OFF, ""
    for row in report.blocks:
        for name, field in _PARTS:
            predicted, real = getattr(row, field), getattr(row, f"{field}_measured")
            if predicted and real and predicted * real > 0:
                factor = max(predicted / real, real / predicted)
                if factor > worst:
                    worst, where = factor, f"{name} {row.index}" if field == "block" else f"{name} of block {row.index}"
    if not where:
        return []
    text = (
        f"The prediction is linear, and a whole part can be far from that: off by {numbers.plain(worst)} times for "
        f"{where}. Go by what is measured."
    )
    return [line(text, "yellow")]


def _certified(report: PruneReport, shown: list[Column]) -> list[RenderableType]:
    """What the certified columns say, and where: named once, for the first block that has the place."""
    names = {"attention": "certified_attention_relative", "ffn": "certified_ffn_relative"}
    printed = [name for name, path in names.items() if any(column.path == path for column in shown)]
    if not printed:
        return []
    first = {n: next((b for b in report.blocks if getattr(b, f"{n}_place")), None) for n in printed}
    places = [f"{_LABEL[n]} of block {b.index} at the {getattr(b, f'{n}_place')}" for n, b in first.items() if b]
    text = (
        "Certified: the most that the removal changes the stream at one token where the part meets it, for any input, "
        "as a multiple of the stream's norm there over these prompts"
    )
    return [line(f"{text} ({'; '.join(places)}).", "dim")]


_LABEL = {"attention": "attention", "ffn": "FFN"}


def _heads_and_neurons(report: PruneReport, page: Page) -> list[RenderableType]:
    rows = report.blocks
    shown = _filled(rows, _head_columns(_SHORT[report.protocol.metric]))
    precision = [line(_precision(report), "dim"), *_shared_heads(report)]
    if not shown:
        return [_BLANK, *precision]
    return [
        _BLANK,
        line(f"Predicted damage of removing one head or one neuron, {report.protocol.unit}", "bold"),
        *(part for table in grids(rows, _BLOCK, shown, page) for part in (_BLANK, table)),
        _BLANK,
        *precision,
        *facts.absences(missing(rows, shown, [row.index for row in rows]), "block"),
    ]


def _head_columns(unit: str) -> list[Column]:
    return [
        Column(("least", "head", unit), "heads.least", numbers.plain),
        Column(("worst", "head", unit), "heads.largest", numbers.plain),
        Column(("median", "neuron", unit), "neurons.median", numbers.error),
        Column(("worst", "neuron", unit), "neurons.largest", numbers.plain),
        Column(("idle", "neurons", "%"), "neurons.negligible_share", numbers.percent),
    ]


def _filled(rows: list[PruneBlock], columns: list[Column]) -> list[Column]:
    return [c for c in columns if any(c.cell(row) != numbers.ABSENT for row in rows)]


def _shared_heads(report: PruneReport) -> list[RenderableType]:
    """Which heads share a key and value head."""
    heads = next((b.heads for b in report.blocks if b.heads), None)
    if heads is None or heads.kv_heads >= heads.count:
        return []
    group = heads.count // heads.kv_heads
    text = f"Heads 0-{group - 1}, and so on by {group}, share a key and value head, which stays while one of them does."
    return [line(text, "dim")]


def _precision(report: PruneReport) -> str:
    """How wide the intervals are that the probes leave."""
    spreads = [
        (t.linearised_high - t.linearised_low) / 2 / abs(t.linearised)
        for t in report.terms
        if t.linearised and t.linearised_low is not None and t.linearised_high is not None
    ]
    middle = statistics.median(spreads) if spreads else 0.0
    idle = ""
    if any(b.neurons for b in report.blocks) and report.plans:
        idle = f"Idle: each alone does less than 1 % of the budget, {numbers.plain(report.plans[0].budget)}. "
    return (
        f"{idle}Linearised, from {report.protocol.probes} probes a prompt: sampling error about "
        f"{numbers.percent(middle)} % ({_exactly(report.protocol.confidence)} % interval); how far from "
        "real ablation: below. Local, frozen and certified readings of every term: --json."
    )


# -- plans ---------------------------------------------------------------------------------------------------


def _plans(report: PruneReport, page: Page) -> list[RenderableType]:
    columns = _plan_columns(_SHORT[report.protocol.metric])
    budget = numbers.plain(report.plans[0].budget) if report.plans else ""
    return [
        _BLANK,
        line(
            f"Largest sets tried within the budget of {budget} {report.protocol.unit} (mean over the prompts)", "bold"
        ),
        *(part for table in grids(report.plans, _KIND, columns, page) for part in (_BLANK, table)),
        _BLANK,
        line("Guarantee", "bold"),
        *(item(_guarantee(plan)) for plan in report.plans),
    ]


def _plan_columns(unit: str) -> list[Column]:
    return [
        Column(("removed", "terms"), "removed", _whole),
        Column(("of", "terms"), "of", _whole),
        Column(("share", "%"), "share", numbers.percent),
        Column(("predicted", unit), "predicted", numbers.plain),
        Column(("measured", unit), "measured", numbers.plain),
    ]


def _guarantee(plan: Plan) -> str:
    given = plan.guarantee
    if given is None:
        return f"{plan.granularity}: none; {plan.reasons.get('guarantee', 'no reason was given')}"
    if not given.removed:
        return (
            f"{plan.granularity}: none; the first set tested, {given.tested[0]} of the {plan.removed}, exceeded the "
            "budget too often"
        )
    return (
        f"{plan.granularity}: with {_exactly(given.confidence)}% confidence, removing {given.removed} of {plan.of} "
        f"exceeds the budget on at most {_exactly(given.share_above_limit)}% of prompts "
        f"({given.exceeded} of {given.holdout_prompts} "
        f"held-out prompts did). {_named(given.set)}"
    )


def _named(terms: Sequence[str]) -> str:
    return f"Which: {', '.join(terms) if len(terms) <= NAMED_TERMS else '--json or --export'}"


def _exactly(share: float) -> str:
    """Per cent, not rounded: 99.9 % confidence must not be printed as 100 %."""
    return f"{100 * share:.10g}"


def _pictures(report: PruneReport, page: Page) -> list[RenderableType]:
    """Damage against the share removed, of the kind with the most to remove."""
    plans = [plan for plan in report.plans if len(plan.curve) > 2]
    if not plans:
        return []
    plan = max(plans, key=lambda p: p.of)
    top = max(max(point.predicted, point.measured or 0.0) for point in plan.curve)
    full, half = ("█", "▌") if page.boxes else ("#", "")
    width = max(10, min(PICTURE_WIDTH, page.width - 40))
    rows = [
        f"{numbers.percent(point.share):>6} % {numbers.plain(point.predicted):>9} {numbers.plain(point.measured):>9}  "
        + _bar(point.measured or 0.0, top, width, full, half)
        for point in plan.curve
    ]
    head = f"{'removed':>8} {'predicted':>9} {'measured':>9}"
    return [
        _BLANK,
        line(
            f"Damage, {report.protocol.unit}, against the share of {plan.granularity}s removed, least damaging first "
            "(bars: measured)",
            "bold",
        ),
        Text(head),
        *(Text(row.rstrip()) for row in rows),
    ]


def _bar(value: float, top: float, width: int, full: str, half: str) -> str:
    halves = round(2 * width * max(value, 0.0) / top) if top > 0 else 0
    return full * (halves // 2) + half * (halves % 2)


# -- prediction ----------------------------------------------------------------------------------------------


def _predictions(report: PruneReport, page: Page) -> list[RenderableType]:
    rows = [p for p in report.prediction if p.n]
    if not rows:
        return []
    names = list(dict.fromkeys(name for p in rows for name in p.criteria))
    return [
        _BLANK,
        line("How well the prediction orders the measured damage", "bold"),
        *(part for table in grids(rows, _KIND, _PREDICTION_COLUMNS, page) for part in (_BLANK, table)),
        *facts.section(f"no value ({numbers.ABSENT})", _absent(rows)),
        *_criteria(rows, names, page),
    ]


def _absent(rows: list[Prediction]) -> list[str]:
    """Why a kind has no figures: each reason once, with all that it explains."""
    found: list[str] = []
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for name, why in row.reasons.items():
            by_reason.setdefault(why, []).append(name.replace("_", " "))
        found += [f"{row.granularity}: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    return found


def _criteria(rows: list[Prediction], names: list[str], page: Page) -> list[RenderableType]:
    if not names:
        return []
    kinds = [row.granularity for row in rows]
    lines = [f"{'criterion':<18}" + "".join(f"{kind:>11}" for kind in kinds)]
    ranked = {"duat, linearised": [r.spearman for r in rows]} | {n: [r.criteria.get(n) for r in rows] for n in names}
    for name, values in ranked.items():
        lines.append(f"{name:<18}" + "".join(f"{_correlation(v.value if v else None):>11}" for v in values))
    return [
        _BLANK,
        line("Spearman's rank correlation with the measured damage, by criterion", "bold"),
        *map(Text, lines),
    ]


def _whole(value: float | None) -> str:
    return numbers.ABSENT if value is None else f"{value:.0f}"


def _correlation(value: float | None) -> str:
    return numbers.ABSENT if value is None else f"{value:.3f}"


_PREDICTION_COLUMNS = [
    Column(("ablated", "terms"), "n", _whole),
    Column(("Spearman", "-1..1"), "spearman", _correlation),
    Column(("low", "-1..1"), "spearman.low", _correlation),
    Column(("high", "-1..1"), "spearman.high", _correlation),
    Column(("Kendall", "-1..1"), "kendall", _correlation),
    Column(("median", "pred./meas."), "median_ratio", numbers.plain),
    Column(("worst", "factor"), "worst_ratio", numbers.plain),
]
TABLES = {
    "blocks[].": [*_part_columns(""), *_certified_columns(), *_head_columns("")],
    "plans[].": _plan_columns(""),
    "prediction[].": _PREDICTION_COLUMNS,
}
