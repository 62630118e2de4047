"""C between the first tokens, the same of a convolution, and the first entries of W'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from duat_cli.report.html.drawing.cells import cells, scale_of_cells
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band
from duat_cli.report.html.drawing.table import Head, Table
from duat_cli.report.tables import numbers
from duat_cli.report.tables.matrix import token_labels
from duat_cli.results.matrix import MatrixReport

_SIGNED = numbers.signed(numbers.plain)


def coupling(report: MatrixReport) -> Figure:
    """The map of C, token by token."""
    count = len(report.coupling)
    which = f"the first {count} of {report.tokens} tokens" if count < report.tokens else "the tokens"
    return Figure(
        key="coupling",
        title=f"Coupling through W': C between {which}",
        says="C_ij = |B_ij|_F, from token j (column) into token i (row). A causal mask leaves what lies right of the "
        "diagonal at zero.",
        picture=_map(report.coupling, token_labels(report), ("from token j", "into token i"), "C", signed=False),
        tables=[_table(report.coupling, token_labels(report), "i", "coupling", "norm", numbers.plain)],
        terms=["coupling"],
    )


def convolution(report: MatrixReport) -> Figure:
    """The same of a convolution, to set beside it."""
    found = report.convolution
    return Figure(
        key="convolution",
        title=f"The same of a 1-D convolution, k = {found.width}",
        says="Its weights are drawn, so only where it is zero says anything. An output token is made of "
        f"{numbers.plain(found.attention_tokens_read)} tokens by this block's attention, of "
        f"{numbers.plain(found.tokens_read)} by the convolution, mean over tokens.",
        picture=_map(found.coupling, token_labels(report), ("from token j", "into token i"), "C", signed=False),
        tables=[_table(found.coupling, token_labels(report), "i", "convolution.coupling", "norm", numbers.plain)],
        terms=["convolution.coupling", "convolution.tokens_read", "convolution.attention_tokens_read"],
    )


def corner(report: MatrixReport) -> Figure:
    """The top-left entries of W'_HVO."""
    side = len(report.corner)
    labels = [str(i) for i in range(side)]
    return Figure(
        key="corner",
        title=f"The corner of W'_HVO: {side} x {side} entries of its block B_00",
        says="From token 0 to token 0: what this component of the input (column) adds to that of the output (row).",
        picture=_map(
            report.corner, labels, ("component of the input", "component of the output"), "entry", signed=True
        ),
        tables=[_table(report.corner, labels, "row", "corner", "entry", _SIGNED)],
        terms=["corner"],
    )


def _map(
    rows: Sequence[Sequence[float]], labels: Sequence[str], axes: tuple[str, str], word: str, *, signed: bool
) -> Markup:
    """Row 0 on top, as a matrix is written."""
    count = len(rows)
    plot = Plot(
        Axis(axes[0], Band([str(i) for i in range(count)], most=count)),
        Axis(axes[1], Band(list(reversed(labels)), most=count)),
        width=540,
        height=80 + max(26, 180 // max(1, count)) * count,
        longest=max((len(label) for label in labels), default=1),
    )

    def said(r: int, c: int) -> str:
        return f"{word}, row {count - 1 - r}, column {c}"

    form = _SIGNED if signed else numbers.plain
    drawn = cells(plot, list(reversed(rows)), said, form)
    largest = max((abs(value) for row in rows for value in row), default=0.0)
    about = f"Map of {count} x {count}: {axes[0]} across, {axes[1]} downwards."
    return plot.svg(drawn, about) + scale_of_cells(largest, signed=signed)


def _table(
    rows: Sequence[Sequence[float]],
    labels: Sequence[str],
    label: str,
    path: str,
    unit: str,
    form: Callable[[float | None], str],
) -> Table:
    return Table(
        heads=[Head(label, number=False), *(Head(str(j), unit, str(j)) for j in range(len(rows)))],
        rows=[[name, *(form(value) for value in row)] for name, row in zip(labels, rows, strict=True)],
        place=f"{path}.",
        at=[f"{path}.{i}" for i in range(len(rows))],
    )
