"""All predictions in rows, and what leads over them."""

from __future__ import annotations

from duat_cli.report.html.attribute.parts import title, token
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.table import Head, table_by, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute.report import SIGNED, place_of
from duat_cli.report.tables.attribute.words import called, computed
from duat_cli.report.tables.grid import Column
from duat_cli.results.attribute import AttributeReport, Attribution

_SPREAD = (
    Column(("mean part", "logits"), "mean", SIGNED),
    Column(("mean of |part|", "logits"), "mean_absolute", numbers.plain),
    Column(("standard deviation", "logits"), "deviation", numbers.plain),
)


def predictions(report: AttributeReport, drawn: int, texts: int) -> list[Figure]:
    """All predictions, a row each, where there are several. drawn: of how many there are all pictures; texts: of how
    many further ones there is the text."""
    if len(report.attribution) < 2:
        return []
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
    return [
        Figure(
            key="all",
            wide=True,
            title=f"All {len(report.attribution)} predictions",
            says="In their order. Adding most is by size, whether it raises the logit or lowers it.",
            tables=[table],
            terms=["attribution[].logit", "attribution[].rank"],
            notes=_left_out(drawn, texts, len(report.attribution)),
        )
    ]


def _token(one: Attribution) -> tuple[str, str]:
    """The one that adds most, and what it adds."""
    added = [t.value + here for t, here in zip(one.parts.tokens, computed(one), strict=True)]
    most = max(range(len(added)), key=lambda t: abs(added[t]), default=None)
    return (numbers.ABSENT, numbers.ABSENT) if most is None else (token(one, most), SIGNED(added[most]))


def _head(one: Attribution) -> tuple[str, str]:
    """The one that moves most, and what it moved."""
    head = max(one.direct.heads, key=lambda h: abs(h.moved), default=None)
    return (numbers.ABSENT, numbers.ABSENT) if head is None else (f"{head.block}.{head.head}", SIGNED(head.moved))


def _left_out(drawn: int, texts: int, of: int) -> list[str]:
    """Which predictions have no pictures."""
    if drawn == of:
        return []
    first = "the first prediction" if drawn == 1 else f"the first {drawn} predictions"
    behind = f"; of the next {texts} there is the text alone" if texts else ""
    return [f"Only {first} {'has' if drawn == 1 else 'have'} all pictures{behind}. The JSON has all parts of all {of}."]


def means(report: AttributeReport) -> list[Figure]:
    """What leads over all predictions."""
    found = report.summary
    if found is None:
        return []
    return [
        Figure(
            key="means",
            title=f"What leads over all {found.predictions} predictions",
            says="By the mean of absolute parts; the deviation is from prediction to prediction.",
            tables=[
                table_of(found.heads, Head("head", number=False), place_of, _SPREAD, "summary.heads[]"),
                table_of(found.neurons, Head("neuron", number=False), place_of, _SPREAD, "summary.neurons[]"),
            ],
            terms=["summary.heads", "summary.neurons"],
        )
    ]
