"""The report of `duat prune-bound` as text: damage of every part, sets, and how good the predictions were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from duat_cli.grouping import by_key
from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import BLOCK, KIND, NO_REASON, Column, filled, fits, titled, unshown
from duat_cli.report.tables.page import BLANK, Page, heading, line, note
from duat_cli.report.tables.prune import repair, sets
from duat_cli.report.tables.prune.eq16 import TABLES as EQ16_TABLES
from duat_cli.report.tables.prune.eq16 import eq16
from duat_cli.report.tables.prune.notable import notable
from duat_cli.report.tables.prune.rivals import TABLES as RIVAL_TABLES
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.terms import NEGLIGIBLE, Prediction
from duat_cli.text import exactly, indices


def render_prune(report: PruneReport, page: Page) -> str:
    """The report as text: what was loaded, damage by block, the largest sets within the budget, how good the
    predictions were."""
    stand_in = "set to zero" if report.protocol.ablate == "zero" else "set to its mean over the prompts"
    return page.render(
        *facts.loaded(report.model, report.prompts, report.environment),
        note(f"damage: {report.protocol.meaning}; a removed term is {stand_in}"),
        *_own_loss(report),
        *_parts(report, page),
        *_heads_and_neurons(report, page),
        *sets.sets(report, page),
        *eq16(report, page),
        *repair.written(report),
        *_predictions(report, page),
        BLANK,
        facts.verdict(report.certificate),
        *facts.section("notable", notable(report)),
        *facts.remarks(report.skipped, report.warnings),
    )


def _own_loss(report: PruneReport) -> list[RenderableType]:
    """A note on the model's own loss, which the damage adds to; a warning if it is no better than a uniform guess."""
    own, uniform = report.protocol.loss, report.protocol.uniform_loss
    if own is None or uniform is None:
        return []
    text = f"loss of the model as it is: {numbers.plain(own)} nats/token (all tokens alike: {numbers.plain(uniform)})"
    if own < uniform:
        return [note(text)]
    return [line(f"{text}; it has nothing to lose, so small damages say nothing of what is removed", "yellow")]


# -- blocks --------------------------------------------------------------------------------------------------


def _parts(report: PruneReport, page: Page) -> list[RenderableType]:
    """Table of whole blocks, attentions and FFNs: measured damage beside predicted damage."""
    columns, optional = part_columns(sets.UNITS[report.protocol.metric]), _CERTIFIED
    rows = report.blocks
    shown = filled(rows, columns)
    if not shown:
        return []
    wanted = [*shown, *optional]
    for column in filled(rows, optional):
        if fits(rows, BLOCK, [*shown, column], page):
            shown.append(column)
    ablated = any(column.path.endswith("_measured") for column in shown)
    how = "predicted, and really ablated" if ablated else "predicted alone (--measure 0)"
    said = [*_far_off(report), *_certified(report, shown), *facts.without_value(rows, BLOCK, shown)]
    return [
        *titled(f"Damage of removing one whole part, {report.protocol.unit}: {how}", rows, BLOCK, shown, page),
        *unshown(rows, wanted, shown),
        *([BLANK, *said] if said else []),
    ]


def part_columns(unit: str) -> list[Column]:
    return [
        Column((name, kind, unit), field + suffix, numbers.plain, (f"{field}, {word}", unit))
        for name, field in _PARTS
        for kind, word, suffix in (("pred.", "predicted", ""), ("meas.", "measured", "_measured"))
    ]


_PARTS = (("block", "block"), ("attention", "attention"), ("cross", "cross"), ("FFN", "ffn"))
_CERTIFIED = [
    Column(("certified", name, "x stream"), f"certified_{field}_relative", numbers.plain)
    for name, field in (("attention", "attention"), ("FFN", "ffn"))
]
FAR_OFF = 2.0  # factor from which a prediction is called far off


def _far_off(report: PruneReport) -> list[RenderableType]:
    """A warning about the part whose prediction is farthest from its ablation, if that is far."""
    worst, where = FAR_OFF, ""
    for row in report.blocks:
        for name, field in _PARTS:
            predicted, real = getattr(row, field), getattr(row, f"{field}_measured")
            if predicted and real and predicted * real > 0:
                factor = max(predicted / real, real / predicted)
                if factor > worst:
                    said = "cross-attention" if field == "cross" else name
                    worst, where = factor, f"{said} {row.index}" if field == "block" else f"{said} of block {row.index}"
    if not where:
        return []
    text = (
        f"The prediction is linear, and a whole part can be far from that: off by {numbers.plain(worst)} times for "
        f"{where}. Go by what is measured."
    )
    return [line(text, "yellow")]


def _certified(report: PruneReport, shown: list[Column]) -> list[RenderableType]:
    """A note on what the certified columns mean, and on where bounds hold, named for the first block that has them."""
    paths = {column.path for column in shown}
    printed = [(name, f"{field}_place") for name, field in _PARTS if f"certified_{field}_relative" in paths]
    if not printed:
        return []
    first = [(name, next((b for b in report.blocks if getattr(b, place)), None), place) for name, place in printed]
    places = [f"{name} of block {b.index} at the {getattr(b, place)}" for name, b, place in first if b]
    text = (
        "Certified: the most that the removal changes the stream at one token where the part meets it, for any input, "
        "as a multiple of the stream's norm there over these prompts"
    )
    return [note(f"{text} ({'; '.join(places)}).")]


def _heads_and_neurons(report: PruneReport, page: Page) -> list[RenderableType]:
    rows = report.blocks
    shown = filled(rows, _head_columns(sets.UNITS[report.protocol.metric]))
    precision = [note(_precision(report)), *_shared_heads(report)]
    if not shown:
        return [BLANK, *precision]
    return [
        *titled(f"Predicted damage of removing {_ones(shown)}, {report.protocol.unit}", rows, BLOCK, shown, page),
        BLANK,
        *precision,
        *facts.without_value(rows, BLOCK, shown),
    ]


def _ones(shown: Sequence[Column]) -> str:
    """The kinds of terms in the columns, in words: one head or one neuron."""
    kinds = [kind for kind in ("head", "neuron") if any(column.path.startswith(f"{kind}s.") for column in shown)]
    return " or ".join(f"one {kind}" for kind in kinds)


def _head_columns(unit: str) -> list[Column]:
    return [
        Column(("least", "head", unit), "heads.least", numbers.plain),
        Column(("worst", "head", unit), "heads.largest", numbers.plain),
        Column(("median", "neuron", unit), "neurons.median", numbers.error),
        Column(("worst", "neuron", unit), "neurons.largest", numbers.plain),
        Column(("idle", "neurons", "%"), "neurons.negligible_share", numbers.percent),
    ]


def _shared_heads(report: PruneReport) -> list[RenderableType]:
    """Notes on heads that share a key and value head, with the blocks where these differ."""
    by_group = by_key((b.heads.count // b.heads.kv_heads, b.index) for b in report.blocks if b.heads)
    share = "Heads 0-{}, and so on by {}, share a key and value head, which stays while one of them does{}."
    where = {group: f" ({indices('block', at)})" if len(by_group) > 1 else "" for group, at in by_group.items()}
    return [note(share.format(group - 1, group, at)) for group, at in where.items() if group > 1]


def _precision(report: PruneReport) -> str:
    """A note on the width of the predictions' intervals, and on idle neurons."""
    spreads = [
        (t.linearised_high - t.linearised_low) / 2 / abs(t.linearised)
        for t in report.terms
        if t.linearised and t.linearised_low is not None and t.linearised_high is not None
    ]
    middle = statistics.median(spreads) if spreads else 0.0
    idle = ""
    if any(b.neurons for b in report.blocks) and report.plans:
        idle = _idle(report)
    ablated = (
        "how far from real ablation: below" if any(p.n for p in report.prediction) else "nothing was ablated alone"
    )
    return (
        f"{idle}Linearised, from {report.protocol.probes} probes a prompt: sampling error about "
        f"{numbers.percent(middle)} % ({exactly(report.protocol.confidence)} % interval); {ablated}. Local, "
        "frozen and certified readings of every term: --json."
    )


def _idle(report: PruneReport) -> str:
    """A sentence on what makes a neuron idle: its measured damage if all were ablated, otherwise its predicted one."""
    neurons, budget = [t for t in report.terms if t.kind == "neuron"], report.plans[0].budget
    less = f"less than 1 % of the budget, {numbers.plain(budget)}"
    ablated = [t for t in neurons if t.measured is not None]
    if neurons and len(ablated) == len(neurons):
        return f"Idle: each alone does {less}, measured. "
    quiet = [t for t in ablated if abs(t.linearised or 0.0) < NEGLIGIBLE * budget]
    wrong = sum(abs(t.measured or 0.0) >= NEGLIGIBLE * budget for t in quiet)
    beside = f"; of {len(quiet)} such that were ablated {wrong} did more" if wrong else ""
    return f"Idle: each alone is predicted to do {less}{beside}. "


# -- prediction ----------------------------------------------------------------------------------------------


def _predictions(report: PruneReport, page: Page) -> list[RenderableType]:
    rows = [p for p in report.prediction if p.n]
    if not rows:
        return []
    ranked = [p for p in rows if p.spearman or p.kendall or p.median_ratio]
    names = list(dict.fromkeys(name for p in ranked for name in p.criteria))
    title = "How well the prediction orders the measured damage"
    return [
        *(titled(title, ranked, KIND, _PREDICTION_COLUMNS, page) if ranked else [BLANK, heading(title)]),
        *_unranked([p for p in rows if p not in ranked]),
        *facts.section(f"no value ({numbers.ABSENT})", _absent(ranked)),
        *_valid(report, rows),
        *_criteria(ranked, names),
        *_means(report, [p for p in rows if p.mean_measured], page),
    ]


def _unranked(rows: list[Prediction]) -> list[RenderableType]:
    """A note on kinds that cannot be ranked, instead of a row of dashes: why, and how far off the prediction was."""
    found = []
    for row in rows:
        known = None if row.worst_ratio is None else numbers.plain(row.worst_ratio)
        worst = known or row.reasons.get("worst_ratio", NO_REASON)
        mean = "" if row.mean_measured else ", and no mean over all is estimated from them"
        found.append(f"{row.granularity}: {row.reasons.get('spearman', NO_REASON)}{mean}; worst factor: {worst}")
    return [note(f"Not ranked: {'; '.join(found)}.")] if found else []


def _valid(report: PruneReport, rows: list[Prediction]) -> list[RenderableType]:
    """A note on the predicted damage up to which the linear prediction is valid, for each kind."""
    found = [f"{row.granularity} {numbers.plain(row.valid_to)}" for row in rows if row.valid_to is not None]
    if not found:
        return []
    text = "Every prediction up to here is within a factor of 2 of its ablation, of the terms that were ablated: "
    return [note(f"{text}{', '.join(found)} {report.protocol.unit}.")]


def _absent(rows: list[Prediction]) -> list[str]:
    """Why kinds have no figures, each reason once with all figures that it explains."""
    found: list[str] = []
    for row in rows:
        by_reason = by_key((why, name.replace("_", " ")) for name, why in row.reasons.items())
        found += [f"{row.granularity}: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    return found


def _means(report: PruneReport, rows: list[Prediction], page: Page) -> list[RenderableType]:
    """Table of the mean damage over all terms of a kind, estimated from those that were ablated."""
    title = (
        f"Mean damage of really removing one term, over all of its kind, {report.protocol.unit}: estimate from the "
        f"ablated ones with the prediction as control variate, {exactly(report.protocol.confidence)} % interval"
    )
    if not rows:
        return []
    return titled(title, rows, KIND, _mean_columns(sets.UNITS[report.protocol.metric]), page)


def _mean_columns(unit: str) -> list[Column]:
    return [
        Column(("all", "terms"), "of", numbers.whole),
        Column(("ablated", "terms"), "n", numbers.whole),
        Column(("mean", "pred.", unit), "mean_predicted", numbers.plain),
        Column(("mean", "estimate", unit), "mean_measured", numbers.plain),
        Column(("low", "estimate", unit), "mean_measured.low", numbers.plain),
        Column(("high", "estimate", unit), "mean_measured.high", numbers.plain),
    ]


def _criteria(rows: list[Prediction], names: list[str]) -> list[RenderableType]:
    if not names:
        return []
    kinds = [row.granularity for row in rows]
    lines = [f"{'criterion':<18}" + "".join(f"{kind:>11}" for kind in kinds)]
    ranked = {"duat, linearised": [r.spearman for r in rows]} | {n: [r.criteria.get(n) for r in rows] for n in names}
    for name, values in ranked.items():
        lines.append(f"{name:<18}" + "".join(f"{_correlation(v.value if v else None):>11}" for v in values))
    return [BLANK, heading("Spearman's rank correlation with the measured damage, by criterion"), *map(Text, lines)]


_correlation = numbers.fixed(3)
_PREDICTION_COLUMNS = [
    Column(("ablated", "terms"), "n", numbers.whole),
    Column(("Spearman", "-1..1"), "spearman", _correlation),
    Column(("low", "-1..1"), "spearman.low", _correlation),
    Column(("high", "-1..1"), "spearman.high", _correlation),
    Column(("Kendall", "-1..1"), "kendall", _correlation),
    Column(("median", "pred./meas."), "median_ratio", numbers.plain),
    Column(("worst", "factor"), "worst_ratio", numbers.plain),
]
TABLES = {
    "blocks[].": [*part_columns(""), *_CERTIFIED, *_head_columns("")],
    **sets.TABLES,
    **RIVAL_TABLES,
    **repair.TABLES,
    **EQ16_TABLES,
    "prediction[].": [*_PREDICTION_COLUMNS, *_mean_columns("")],
}
