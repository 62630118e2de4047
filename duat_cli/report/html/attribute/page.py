"""The sheet of `duat attribute`."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from duat_cli.report.html.attribute.heads import flows, heads
from duat_cli.report.html.attribute.layers import blocks, token_by_layer
from duat_cli.report.html.attribute.measured import measured
from duat_cli.report.html.attribute.parts import SIGNED, title
from duat_cli.report.html.attribute.text import coloured, continued
from duat_cli.report.html.drawing import facts
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, Verdict
from duat_cli.report.html.drawing.table import Head, Table, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute import place_of
from duat_cli.report.tables.grid import Column
from duat_cli.results.attribute import AttributeReport, AttributionCertificate, Spread
from duat_cli.results.base import Result

_SHOWN = 4  # predictions with all their pictures
_NOT_CAUSAL = (
    "Parts are exact shares of this output with attention, norms and gates held as they are. They do not say what "
    "would happen if a part were removed: then these react."
)
_SPREAD = (
    Column(("mean part", "logits"), "mean", SIGNED),
    Column(("mean of |part|", "logits"), "mean_absolute", numbers.plain),
    Column(("standard deviation", "logits"), "deviation", numbers.plain),
)


def attribute_sheet(report: AttributeReport, beside: Sequence[AttributeReport]) -> Sheet:
    """The first predictions in pictures, all of them in a table. beside: of no matter; logits have no common scale."""
    figures: list[Figure | None] = [continued(one, number) for number, one in enumerate(report.continuations[:_SHOWN])]
    for number in range(min(_SHOWN, len(report.attribution))):
        figures += [coloured(report, number), token_by_layer(report, number), blocks(report, number)]
        figures += [heads(report, number), flows(report, number), measured(report, number), _inner(report, number)]
    return Sheet(
        command=report.command,
        name=facts.named(report.model),
        facts=facts.loaded(report.model, report.environment, report.prompts),
        verdict=_verdict(report.certificate),
        tiles=_tiles(report),
        lists=[
            ("How to read it", [_NOT_CAUSAL]),
            ("Held fixed between the last block and the logits", report.held),
            facts.skipped(report.skipped),
            ("Warnings", report.warnings),
        ],
        figures=[*(figure for figure in figures if figure is not None), *_all(report), *_means(report)],
    )


def _tiles(report: AttributeReport) -> list[Tile]:
    found = [Tile("certificate", numbers.error(report.certificate.residual), "relative", "certificate.residual")]
    if report.summary is not None:
        found.append(Tile("predictions", str(report.summary.predictions), "", "summary.predictions"))
        found.append(Tile("mean logit", numbers.plain(report.summary.logit), "logits", "summary.logit"))
    return found


def _verdict(certificate: AttributionCertificate) -> Verdict:
    text = (
        f"the parts miss the untouched model's own logit by {numbers.error(certificate.residual)} of the largest "
        f"partial sum, tolerance {certificate.tolerance:.0e}"
    )
    if certificate.exact:
        return Verdict("good", "exact", text)
    return Verdict("bad", "NOT EXACT", f"{text}; do not rely on the numbers below")


def _inner(report: AttributeReport, number: int) -> Figure | None:
    """Leading neurons and experts."""
    one = report.attribution[number]
    tables = [
        Table(
            heads=[
                Head(word, "block.unit.index"),
                Head("part", "logits", "value"),
                Head("straight to the logit", "logits", "direct"),
            ],
            rows=[[place_of(p, several=True), SIGNED(p.value), SIGNED(p.direct)] for p in parts],
            place=f"attribution[].{reading}.{word}s[].",
            at=[f"attribution.{number}.{reading}.{word}s.{i}" for i in range(len(parts))],
        )
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
        picture=Markup(),
        tables=tables,
        terms=["attribution[].parts.neurons[].value"],
        opened=True,
    )


def _all(report: AttributeReport) -> list[Figure]:
    """All predictions, a row each, where there are several."""
    if len(report.attribution) < 2:
        return []
    left = len(report.attribution) - _SHOWN
    table = Table(
        heads=[
            Head("prediction", number=False),
            Head("logit", "logits", "logit"),
            Head("choice of the model", "", "rank"),
            Head("certificate", "relative", "residual"),
        ],
        rows=[
            [
                title(one, len(report.prompts)),
                numbers.plain(one.logit),
                numbers.whole(one.rank),
                numbers.error(one.residual),
            ]
            for one in report.attribution
        ],
        place="attribution[].",
        at=[f"attribution.{i}" for i in range(len(report.attribution))],
    )
    return [
        Figure(
            key="all",
            wide=True,
            title=f"All {len(report.attribution)} predictions",
            says="In their order.",
            picture=Markup(),
            tables=[table],
            terms=["attribution[].logit", "attribution[].rank"],
            notes=[f"Pictures are of the first {_SHOWN}; the other {left} are in the JSON."] if left > 0 else [],
            opened=True,
        )
    ]


def _means(report: AttributeReport) -> list[Figure]:
    """What leads over all predictions."""
    found = report.summary
    if found is None:
        return []
    return [
        Figure(
            key="means",
            title=f"What leads over all {found.predictions} predictions",
            says="By the mean of absolute parts; the deviation is from prediction to prediction.",
            picture=Markup(),
            tables=[
                table_of(found.heads, "head", _spread, _SPREAD, "summary.heads[].", numbered=False),
                table_of(found.neurons, "neuron", _spread, _SPREAD, "summary.neurons[].", numbered=False),
            ],
            terms=["summary.heads", "summary.neurons"],
            opened=True,
        )
    ]


def _spread(row: Result) -> str:
    assert isinstance(row, Spread)
    return place_of(row)
