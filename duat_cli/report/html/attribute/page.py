"""The sheet of `duat attribute`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from duat_cli.report.html.attribute.heads import flows, heads, measured
from duat_cli.report.html.attribute.tokens import blocks, coloured, continued, token_by_layer
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, sheet_of, tiles_of, verdict_of
from duat_cli.report.html.drawing.table import Head, table_by, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute import columns
from duat_cli.report.tables.attribute.words import (
    NOT_CAUSAL,
    added,
    called,
    leading,
    place_of,
    title,
    token,
    unit,
    verdict,
)
from duat_cli.report.tables.grid import Column, on_page
from duat_cli.report.tables.numbers import SIGNED
from duat_cli.results.attribute import AttributeReport, Attribution

_INNER, _SPREAD = on_page(columns.INNER), on_page(columns.SPREAD)
_SHOWN = 4  # most predictions with all pictures, and most further ones with only their text
_DRAWN = 200  # most tokens of the former together
_COLOURED = 400  # most tokens of the latter together


def attribute_sheet(report: AttributeReport, beside: Sequence[AttributeReport]) -> Sheet:
    """The sheet: the first predictions as pictures, all in a table. beside: unused, as logits have no common scale."""
    drawn = _leading(report.attribution[:_SHOWN], _DRAWN, least=1)
    texts = _leading(report.attribution[drawn : drawn + _SHOWN], _COLOURED)
    figures = list[Figure | None]()
    for number in range(drawn):
        figures += [coloured(report, number), token_by_layer(report, number), blocks(report, number)]
        figures += [heads(report, number), flows(report, number), measured(report, number), _inner(report, number)]
    figures += [coloured(report, number, whole=False) for number in range(drawn, drawn + texts)]
    figures += [_predictions(report, drawn, texts), _means(report)]
    of = unit(report.attribution[0])
    continuations = (continued(found, number, of) for number, found in enumerate(report.continuations[:_SHOWN]))
    figures = [_in(of, one) for one in (*continuations, *figures) if one is not None]
    lists = [("How to read it", [NOT_CAUSAL]), ("Held fixed between the last block and the output", report.held)]
    said = verdict_of(verdict(report.certificate), exact=report.certificate.exact)
    return sheet_of(report, report.prompts, _tiles(report), lists, figures, said=said)


def _in(unit: str, figure: Figure) -> Figure:
    """The figure with that unit in its tables, where they say logits."""
    tables = [
        replace(table, heads=[replace(head, unit=unit) if head.unit == "logits" else head for head in table.heads])
        for table in figure.tables
    ]
    return replace(figure, tables=tables)


def _leading(predictions: Sequence[Attribution], room: int, least: int = 0) -> int:
    """How many of the first predictions have at most `room` tokens together; at least `least`, if there are so many."""
    tokens = list(itertools.accumulate(len(one.parts.tokens) for one in predictions))
    return max(min(least, len(tokens)), sum(count <= room for count in tokens))


def _tiles(report: AttributeReport) -> list[Tile]:
    columns = [Column(("certificate", "relative"), "certificate.residual", numbers.error)]
    if report.summary is not None:
        columns.append(Column(("predictions", ""), "summary.predictions", numbers.whole))
        one = report.attribution[0]
        columns.append(Column((f"mean {called(one)}", unit(one)), "summary.logit", numbers.plain))
    return tiles_of(report, columns)


def _inner(report: AttributeReport, number: int) -> Figure | None:
    one = report.attribution[number]
    tables = [
        table_of(parts, Head(word, "block.index"), place_of, _INNER, f"attribution.{number}.{reading}.{word}s[]")
        for reading, word, parts in (
            ("parts", "neuron", one.parts.neurons),
            ("parts", "expert", one.parts.experts),
            ("direct", "neuron", one.direct.neurons),
            ("direct", "expert", one.direct.experts),
        )
        if parts
    ]
    if not tables:
        return None
    return Figure(
        key=f"inner-{number}",
        half=True,
        title=f"Leading neurons and experts: {title(one, len(report.prompts))}",
        says="Parts of their unit's part, not beside it: those that lead through all later blocks, then those that "
        "lead straight to the output.",
        tables=tables,
        terms=["attribution[].parts.neurons[].value"],
    )


def _predictions(report: AttributeReport, drawn: int, texts: int) -> Figure | None:
    """A table with a row per prediction, if there are several. drawn: how many have all pictures; texts: how many
    further ones have only their text."""
    if len(report.attribution) < 2:
        return None
    table = table_by(
        "attribution[]",
        report.attribution,
        (Head("prediction", number=False), lambda one: title(one, len(report.prompts))),
        Column((called(report.attribution[0]), "logits"), "logit", numbers.plain),
        Column(("choice of the model", ""), "rank", numbers.whole),
        Column(("certificate", "relative"), "residual", numbers.error),
        (Head("token that adds most", number=False), lambda one: _token(one)[0]),
        (Head("it adds", "logits"), lambda one: _token(one)[1]),
        (Head("head that moves most", "block.head"), lambda one: _head(one)[0]),
        (Head("it moved", "logits"), lambda one: _head(one)[1]),
    )
    return Figure(
        key="all",
        title=f"All {len(report.attribution)} predictions",
        says="In their order. Adding most is by size, whether it raises the output or lowers it.",
        tables=[table],
        terms=["attribution[].logit", "attribution[].rank"],
        notes=_left_out(drawn, texts, len(report.attribution)),
    )


def _token(one: Attribution) -> tuple[str, str]:
    """The token that adds most, and what it adds."""
    every = added(one)
    most = leading(every, 1)
    return (token(one, most[0]), SIGNED(every[most[0]])) if most else (numbers.ABSENT, numbers.ABSENT)


def _head(one: Attribution) -> tuple[str, str]:
    """The head that moves most, and what it moved."""
    head = max(one.direct.heads, key=lambda h: abs(h.moved), default=None)
    return (numbers.ABSENT, numbers.ABSENT) if head is None else (f"{head.block}.{head.head}", SIGNED(head.moved))


def _left_out(drawn: int, texts: int, of: int) -> list[str]:
    if drawn == of:
        return []
    first = "the first prediction" if drawn == 1 else f"the first {drawn} predictions"
    behind = f"; of the next {texts} there is the text alone" if texts else ""
    return [f"Only {first} {'has' if drawn == 1 else 'have'} all pictures{behind}. The JSON has all parts of all {of}."]


def _means(report: AttributeReport) -> Figure | None:
    found = report.summary
    if found is None:
        return None
    return Figure(
        key="means",
        half=True,
        title=f"What leads over all {found.predictions} predictions",
        says="By the mean of absolute parts; the deviation is from prediction to prediction.",
        tables=[
            table_of(found.heads, Head("head", number=False), place_of, _SPREAD, "summary.heads[]"),
            table_of(found.neurons, Head("neuron", number=False), place_of, _SPREAD, "summary.neurons[]"),
        ],
        terms=["summary.heads", "summary.neurons"],
    )
