"""Frozen parts against what removal does, with --measure."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.table import Head, Table, table_by
from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute.report import SIGNED, place_of
from duat_cli.report.tables.attribute.words import THROUGH_SCORES, called, lost, title
from duat_cli.report.tables.grid import Column
from duat_cli.results.attribute import AttributeReport, MeasuredParts, RemovedPart

_SERIES = (
    ("heads, set to zero", "s1"),
    ("neurons, set to zero", "s2"),
    ("tokens, attention to them cut", "s3"),
    ("tokens, replaced by the mean one", "s4"),
)


def measured(report: AttributeReport, number: int) -> Figure | None:
    """A point for each part taken out: its frozen part across, what the logit lost upwards."""
    one = report.attribution[number]
    if one.measured is None:
        return None
    series = _points(one.measured)
    every = [value for points in series for _, part, change in points for value in (part, change)]
    scale = Linear.over(every)
    plot = Plot(
        Axis("frozen part (logits)", scale),
        Axis(f"{called(one)} lost without it (logits)", scale),
        width=500,
        height=330,
    )
    drawn = [
        marks.rule(plot.x(scale.low), plot.y(scale.low), plot.x(scale.high), plot.y(scale.high), "as much as the part")
    ]
    for (word, name), points in zip(_SERIES, series, strict=True):
        drawn += [
            marks.dot(plot.x(x), plot.y(y), name, f"{label}, {word}: part {SIGNED(x)}, lost {SIGNED(y)}")
            for label, x, y in points
        ]
    agreement = [
        f"{a.what}: rank correlation {a.rank_correlation:.2f}, of {a.count}"
        for a in one.measured.agreement
        if a.rank_correlation is not None
    ]
    return Figure(
        key=f"measured-{number}",
        title=f"Frozen parts against removal: {title(one, len(report.prompts))}",
        says="Each leading part taken out for real, one at a time. On the dashed line as much is lost as the part "
        f"says; parts are no causal statement, so points may lie elsewhere. Lost: {lost(one)}. {THROUGH_SCORES}",
        picture=plot.svg(drawn, "Points: frozen part across, what is lost upwards."),
        tables=[
            _removed("head", one.measured.heads, f"attribution.{number}.measured.heads[]"),
            _removed("neuron", one.measured.neurons, f"attribution.{number}.measured.neurons[]"),
            _tokens(one.measured, f"attribution.{number}.measured.tokens[]"),
        ],
        terms=["attribution[].measured.heads[].change", "attribution[].measured.tokens[].cut"],
        legend=[("dot", name, word) for word, name in _SERIES],
        notes=[*agreement, *(f"{left.what} was not taken out: {left.why}." for left in one.measured.skipped)],
    )


def _points(found: MeasuredParts) -> list[list[tuple[str, float, float]]]:
    return [
        [(f"head {h.block}.{h.index}", h.part, h.change) for h in found.heads if h.change is not None],
        [(f"neuron {place_of(n)}", n.part, n.change) for n in found.neurons if n.change is not None],
        [(f"token {t.position}", t.part, t.cut) for t in found.tokens if t.cut is not None],
        [(f"token {t.position}", t.part, t.replaced) for t in found.tokens if t.replaced is not None],
    ]


def _removed(word: str, parts: Sequence[RemovedPart], path: str) -> Table:
    return table_by(
        path,
        parts,
        (Head(word, f"block.{word}"), place_of),
        Column(("part", "logits"), "part", SIGNED),
        Column(("lost without it", "logits"), "change", SIGNED),
        Column(("KL", "nats"), "kl", numbers.plain),
    )


def _tokens(found: MeasuredParts, path: str) -> Table:
    return table_by(
        path,
        found.tokens,
        (Head("token", number=False), lambda t: f"{t.position} '{t.text}'"),
        Column(("part", "logits"), "part", SIGNED),
        Column(("lost, attention cut", "logits"), "cut", SIGNED),
        Column(("KL", "nats"), "cut_kl", numbers.plain),
        Column(("lost, replaced", "logits"), "replaced", SIGNED),
        Column(("KL", "nats"), "replaced_kl", numbers.plain),
    )
