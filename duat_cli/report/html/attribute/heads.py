"""Figures on the leading heads (what they write and move), and on the losses when leading parts are removed."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.elements import short, tag
from duat_cli.report.html.drawing.figure import Figure, noted
from duat_cli.report.html.drawing.plot import Axis, Plot, diagonal, level
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.table import Head, Table, table_by, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute import columns
from duat_cli.report.tables.attribute.words import (
    THROUGH_SCORES,
    called,
    leading_heads,
    lost,
    place_of,
    title,
    token,
    unit,
)
from duat_cli.report.tables.grid import on_page
from duat_cli.report.tables.numbers import SIGNED
from duat_cli.results.attribute import AttributeReport, Attribution, Flow, MeasuredParts, Move, RemovedPart

_HEADS = 12
_MOVES = 16
_SERIES = (
    ("heads, set to zero", "s1"),
    ("neurons, set to zero", "s2"),
    ("tokens, attention to them cut", "s3"),
    ("tokens, replaced by the mean one", "s4"),
)


def heads(report: AttributeReport, number: int) -> Figure | None:
    one = report.attribution[number]
    every = one.direct.heads
    places = leading_heads(one, _HEADS)
    if not places:
        return None
    found = [every[i] for i in places]
    plot = Plot(
        Axis("head (block.head)", Band([f"{h.block}.{h.head}" for h in found], most=_HEADS)),
        Axis(f"part ({unit(one)})", Linear.over([v for h in found for v in (h.value, h.moved)])),
        width=500,
        height=260,
    )
    drawn = [level(plot, 0.0)]
    for place, head in enumerate(found):
        drawn.append(marks.span(plot.x(place), plot.y(0), plot.x(place), plot.y(head.moved), "s1"))
        for value, series, word in ((head.moved, "s1", "moved"), (head.value, "s3", "written")):
            said = f"head {head.block}.{head.head}, {word}: {SIGNED(value)}"
            drawn.append(marks.dot(plot.x(place), plot.y(value), series, said))
    return Figure(
        key=f"heads-{number}",
        half=True,
        title=f"Leading heads: {title(one, len(report.prompts))}",
        says="Moved: to the output through all later blocks, a way that other parts take. Written: straight to it.",
        picture=plot.svg(drawn, "Two points for each leading head."),
        tables=[
            table_of(
                found,
                Head("head", "block.head"),
                lambda h: f"{h.block}.{h.head}",
                on_page(columns.HEADS),
                f"attribution.{number}.direct.heads[]",
                numbers=places,
            )
        ],
        terms=["attribution[].direct.heads[].value", "attribution[].direct.heads[].moved"],
        legend=[("dot", "s1", "moved"), ("dot", "s3", "written to the output")],
        notes=noted(len(every) - len(found), "further heads are in the JSON."),
    )


def flows(report: AttributeReport, number: int) -> Figure | None:
    one = report.attribution[number]
    places = [(i, k) for i, flow in enumerate(one.flows) for k in range(len(flow.moves))]
    places.sort(key=lambda place: -abs(one.flows[place[0]].moves[place[1]].value))
    kept = places[:_MOVES]
    if not kept:
        return None
    moves = [(one.flows[i], one.flows[i].moves[k]) for i, k in kept]
    return Figure(
        key=f"flows-{number}",
        half=True,
        title=f"What the leading heads moved from token to token: {title(one, len(report.prompts))}",
        says="Arcs above lead to a later token, arcs below to an earlier one, rings stay. Thick arcs move much; dashed "
        "ones against the prediction. Tokens that take no part are left out.",
        picture=_arcs(one, moves),
        tables=[
            Table(
                heads=[
                    Head("head", "block.head"),
                    Head("from", number=False),
                    Head("to", number=False),
                    Head("moved", "logits", "value"),
                    Head("attention", "entry of H", "attention"),
                    Head("value at full attention", "logits", "carried"),
                ],
                rows=[
                    [f"{f.block}.{f.head}", token(one, m.source), token(one, m.target), SIGNED(m.value),
                     numbers.plain(m.attention), SIGNED(m.carried)]
                    for f, m in moves
                ],
                place="attribution[].flows[].moves[].",
                at=[f"attribution.{number}.flows.{i}.moves.{k}" for i, k in kept],
            )
        ],
        terms=["attribution[].flows[].moves[].value", "attribution[].flows[].moves[].attention"],
        notes=noted(len(places) - len(kept), "smaller moves are in the JSON."),
    )  # fmt: skip


def _arcs(one: Attribution, moves: list[tuple[Flow, Move]]) -> Markup:
    """Arcs between tokens. Only tokens at which a move begins or ends are drawn, in order and evenly spaced."""
    ends = sorted({place for _, move in moves for place in (move.source, move.target)})
    plot = Plot(Axis("", Band([""] * len(ends))), Axis("", Band([])), width=500, height=300)
    x = {place: plot.x(number) - 15 for number, place in enumerate(ends)}
    largest = max(abs(move.value) for _, move in moves)
    middle, room = 175.0, 150.0
    drawn = [tag("line", x1=plot.left - 20, x2=plot.right, y1=middle, y2=middle, class_="base")]
    for flow, move in reversed(moves):
        a, b = x[move.source], x[move.target]
        said = (
            f"head {flow.block}.{flow.head}: {token(one, move.source)} to {token(one, move.target)}, "
            f"{SIGNED(move.value)}"
        )
        rise = room * min(1.0, 0.15 + abs(b - a) / (plot.right - plot.left)) * (1 if b >= a else -0.25)
        if a == b:
            path = f"M{short(a)} {short(middle)}m-6 0a6 8 0 1 1 12 0"
        else:
            above = short(middle - rise)
            path = f"M{short(a)} {short(middle)}C{short(a)} {above} {short(b)} {above} {short(b)} {short(middle)}"
        weight = 1 + 5 * abs(move.value) / largest
        sign = "against" if move.value < 0 else "towards"
        drawn.append(tag("path", tag("title", said), d=path, stroke_width=weight, class_=f"arc {sign}"))
    for place, at in x.items():
        text = one.parts.tokens[place].text if place < len(one.parts.tokens) else ""
        drawn.append(tag("circle", cx=at, cy=middle, r=2.5, class_="end"))
        turned = f"translate({short(at - 3)} {short(middle + 14)}) rotate(65)"
        drawn.append(tag("text", f"{place} {text[:10]}", transform=turned))
    return tag(
        "svg", *drawn, viewBox="0 0 500 300", width=500, height=300, class_="narrow", role="img",
        aria_label="Arcs between tokens, one for each of the largest moves.",
    )  # fmt: skip


def measured(report: AttributeReport, number: int) -> Figure | None:
    one = report.attribution[number]
    if one.measured is None:
        return None
    series = _points(one.measured)
    every = [value for points in series for _, part, change in points for value in (part, change)]
    scale = Linear.over(every)
    plot = Plot(
        Axis(f"frozen part ({unit(one)})", scale),
        Axis(f"{called(one)} lost without it ({unit(one)})", scale),
        width=500,
        height=330,
    )
    drawn = [diagonal(plot, "as much as the part")]
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
        half=True,
        title=f"Frozen parts against removal: {title(one, len(report.prompts))}",
        says="Each leading part taken out for real, one at a time. On the dashed line as much is lost as the part "
        f"says; parts are no causal statement, so points may lie elsewhere. Lost: {lost(one)}. {THROUGH_SCORES}",
        picture=plot.svg(drawn, "Points: frozen part across, what is lost upwards."),
        tables=[
            _removed("head", one.measured.heads, f"attribution.{number}.measured.heads[]"),
            _removed("neuron", one.measured.neurons, f"attribution.{number}.measured.neurons[]"),
            table_by(
                f"attribution.{number}.measured.tokens[]",
                one.measured.tokens,
                (Head("token", number=False), lambda t: f"{t.position} '{t.text}'"),
                *on_page(columns.REMOVED_TOKENS),
            ),
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
    return table_by(path, parts, (Head(word, f"block.{word}"), place_of), *on_page(columns.REMOVED))
