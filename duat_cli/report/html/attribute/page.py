"""The sheet of `duat attribute`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from duat_cli.report.html.attribute.heads import flows, heads
from duat_cli.report.html.attribute.layers import blocks, token_by_layer
from duat_cli.report.html.attribute.measured import measured
from duat_cli.report.html.attribute.overview import means, predictions
from duat_cli.report.html.attribute.parts import title
from duat_cli.report.html.attribute.text import coloured, continued
from duat_cli.report.html.drawing import facts
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, Verdict
from duat_cli.report.html.drawing.table import Head, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute.report import SIGNED, missed, place_of
from duat_cli.report.tables.attribute.words import NOT_CAUSAL, called
from duat_cli.report.tables.grid import Column
from duat_cli.results.attribute import AttributeReport, Attribution, AttributionCertificate

_INNER = (Column(("part", "logits"), "value", SIGNED), Column(("straight to the logit", "logits"), "direct", SIGNED))
_SHOWN = 4  # predictions with all their pictures, and as many whose text alone is shown
_DRAWN = 200  # tokens that the first of these may have together
_COLOURED = 400  # tokens that the second may have together


def attribute_sheet(report: AttributeReport, beside: Sequence[AttributeReport]) -> Sheet:
    """The first predictions in pictures, all of them in a table. beside: of no matter; logits have no common scale."""
    drawn = _leading(report.attribution[:_SHOWN], _DRAWN, least=1)
    texts = _leading(report.attribution[drawn : drawn + _SHOWN], _COLOURED)
    figures: list[Figure | None] = [continued(one, number) for number, one in enumerate(report.continuations[:_SHOWN])]
    for number in range(drawn):
        figures += [coloured(report, number), token_by_layer(report, number), blocks(report, number)]
        figures += [heads(report, number), flows(report, number), measured(report, number), _inner(report, number)]
    figures += [coloured(report, number, whole=False) for number in range(drawn, drawn + texts)]
    figures += [*predictions(report, drawn, texts), *means(report)]
    lists = [("How to read it", [NOT_CAUSAL]), ("Held fixed between the last block and the logits", report.held)]
    return facts.sheet(report, report.prompts, _tiles(report), lists, figures, said=_verdict(report.certificate))


def _leading(predictions: Sequence[Attribution], room: int, least: int = 0) -> int:
    """How many have at most so many tokens together."""
    tokens = list(itertools.accumulate(len(one.parts.tokens) for one in predictions))
    return max(min(least, len(tokens)), sum(count <= room for count in tokens))


def _tiles(report: AttributeReport) -> list[Tile]:
    found = [Tile("certificate", numbers.error(report.certificate.residual), "relative", "certificate.residual")]
    if report.summary is not None:
        found.append(Tile("predictions", str(report.summary.predictions), "", "summary.predictions"))
        found.append(
            Tile(
                f"mean {called(report.attribution[0])}", numbers.plain(report.summary.logit), "logits", "summary.logit"
            )
        )
    return found


def _verdict(certificate: AttributionCertificate) -> Verdict:
    if certificate.exact:
        return Verdict("good", "exact", missed(certificate))
    return Verdict("bad", "NOT EXACT", f"{missed(certificate)}; do not rely on the numbers below")


def _inner(report: AttributeReport, number: int) -> Figure | None:
    """Leading neurons and experts."""
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
        title=f"Leading neurons and experts: {title(one, len(report.prompts))}",
        says="Parts of their unit's part, not beside it: those that lead through all later blocks, then those that "
        "lead straight to the logit.",
        tables=tables,
        terms=["attribution[].parts.neurons[].value"],
    )
