"""The pages of `duat matrix` (maps of one block, the checks, and the paper's matrices) and of `--network`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.cells import cell_map
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, Verdict, sheet_of, tiles_of, verdict_of
from duat_cli.report.html.drawing.plot import Axis, Plot, curve, level
from duat_cli.report.html.drawing.scales import Band, Log
from duat_cli.report.html.drawing.table import Head, Table, table_by, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.facts import heads, verdict
from duat_cli.report.tables.grid import Column, on_page
from duat_cli.report.tables.matrix import LAYER_COLUMNS, NORMS, VERDICTS, mapped, origin, quoted, token_labels
from duat_cli.results.matrix import MatrixReport, NetworkReport

_TILES = (
    Column(("tokens", "N"), "tokens", numbers.whole),
    Column(("width", "M"), "hidden_size", numbers.whole),
    Column(("certificate", "relative"), "certificate.relative_error", numbers.error),
)
_LAYER = on_page(LAYER_COLUMNS)
_LINES = ((_LAYER[1], "s2"), (_LAYER[2], "s3"), (_LAYER[3], "s1"))
_SAYS = (
    "|left - right| / |right|, both sides computed separately. The model's own is the H V of its forward pass "
    "and what that moves in its own block, biases left out. c: as many of the M columns as can be built; <> is the "
    "diamond product, W <> x = W^T x."
)


def matrix_sheet(report: MatrixReport, beside: Sequence[MatrixReport]) -> Sheet:
    lists = [("What the papers say", quoted(report.matrices))]
    figures = [_coupling(report), _convolution(report), _corner(report), _checks(report, beside), _forms(report)]
    more, said, part = [_case(report)], _verdict(report), f", block {report.layer}"
    return sheet_of(report, [report.prompt], tiles_of(report, _TILES), lists, figures, more=more, said=said, of=part)


def _case(report: MatrixReport) -> str:
    built = "the matrices are built" if report.dense else "too large to build, so in factors"
    return f"{report.name}: {heads(report, 'key/value')} of width d = {report.head_width}; {origin(report)}; {built}"


def _verdict(report: MatrixReport) -> Verdict:
    """The verdict from the certificate and the checks together."""
    plain = verdict_of(verdict(report.certificate), exact=report.certificate.exact)
    failed = [check.name for check in report.checks if check.holds is False]
    made = sum(check.holds is not None for check in report.checks)
    if failed:
        return Verdict("bad", "FAILS", f"{', '.join(failed)}; {plain.word} {plain.text}")
    of = "" if made == len(report.checks) else f" of {len(report.checks)}"
    return Verdict(plain.state, plain.word, f"{plain.text}; {made}{of} checks hold")


def _coupling(report: MatrixReport) -> Figure:
    title = f"Coupling through W': C between {mapped(report)}"
    says = (
        "C_ij = |B_ij|_F, from token j (column) into token i (row). A causal mask leaves what lies right of the "
        "diagonal at zero."
    )
    return _square("coupling", report.coupling, token_labels(report), title, says)


def _convolution(report: MatrixReport) -> Figure:
    found = report.convolution
    title = f"The same of a 1-D convolution, k = {found.width}"
    says = (
        "Its weights are drawn, so only where it is zero says anything. An output token is made of "
        f"{numbers.plain(found.attention_tokens_read)} tokens by this block's attention, of "
        f"{numbers.plain(found.tokens_read)} by the convolution, mean over tokens."
    )
    more = ("convolution.tokens_read", "convolution.attention_tokens_read")
    return _square("convolution.coupling", found.coupling, token_labels(report), title, says, *more)


def _corner(report: MatrixReport) -> Figure:
    side = len(report.corner)
    title = f"The corner of W'_HVO: {side} x {side} entries of its block B_00"
    says = "From token 0 to token 0: what this component of the input (column) adds to that of the output (row)."
    return _square("corner", report.corner, [str(i) for i in range(side)], title, says, entries=True)


def _square(
    path: str,
    rows: Sequence[Sequence[float]],
    labels: Sequence[str],
    title: str,
    says: str,
    *terms: str,
    entries: bool = False,
) -> Figure:
    """A map with row 0 on top, as matrices are written. path: of the rows in the report. labels: of the rows. terms:
    further fields to link. entries: whether the numbers are entries of W' instead of norms of its blocks."""
    count, form = len(rows), numbers.SIGNED if entries else numbers.plain
    word, unit, label = ("entry", "entry", "row") if entries else ("C", "norm", "i")
    axes = ("component of the input", "component of the output") if entries else ("from token j", "into token i")
    plot = Plot(
        Axis(axes[0], Band([str(i) for i in range(count)], most=count)),
        Axis(axes[1], Band(list(reversed(labels)), most=count)),
        width=540,
        height=80 + max(26, 180 // max(1, count)) * count,
        longest=max((len(label) for label in labels), default=1),
    )

    def said(r: int, c: int) -> str:
        return f"{word}, row {count - 1 - r}, column {c}"

    about = f"Map of {count} x {count}: {axes[0]} across, {axes[1]} downwards."
    table = Table(
        heads=[Head(label, number=False), *(Head(str(j), unit, str(j)) for j in range(count))],
        rows=[[name, *(form(value) for value in row)] for name, row in zip(labels, rows, strict=True)],
        place=f"{path}.",
        at=[f"{path}.{i}" for i in range(count)],
    )
    return Figure(
        key=path.partition(".")[0],
        half=True,
        title=title,
        says=says,
        picture=cell_map(plot, list(reversed(rows)), said, about, form, signed=entries),
        tables=[table],
        terms=[path, *terms],
    )


def _checks(report: MatrixReport, beside: Sequence[MatrixReport]) -> Figure:
    """A plot with a point per check, and a line at its tolerance; errors of exactly zero have no place on the axis."""
    rows = report.checks
    every = [value for one in beside for check in one.checks for value in (check.relative_error, check.tolerance)]
    plot = Plot(
        Axis("check (number in the table)", Band([str(number + 1) for number in range(len(rows))])),
        Axis("relative error", Log.over(every)),
        height=250,
    )
    drawn = []
    for place, check in enumerate(rows):
        at = plot.y(check.tolerance)
        said = f"tolerance {check.tolerance:.0e}"
        drawn.append(marks.rule(plot.x(place - 0.4), at, plot.x(place + 0.4), at, said))
        if check.relative_error:
            text = f"{check.name}: {numbers.error(check.relative_error)}, {VERDICTS[check.holds]}"
            drawn.append(marks.dot(plot.x(place), plot.y(check.relative_error), "s1", text))
    zero = [str(number + 1) for number, check in enumerate(rows) if check.relative_error == 0]
    notes = [f"An error of 0 has no place on this axis: check {', '.join(zero)}."] if zero else []
    reasons = dict.fromkeys(check.reasons["relative_error"] for check in rows if "relative_error" in check.reasons)
    return Figure(
        key="checks",
        title="Every step of the paper, checked",
        says=_SAYS,
        picture=plot.svg(drawn, "A point for each check, and its tolerance."),
        tables=[
            table_by(
                "checks[]",
                list(enumerate(rows, 1)),
                (Head("check"), lambda one: str(one[0])),
                (Head("statement", path="statement", number=False, long=True), lambda one: one[1].statement),
                (Head("error", "relative", "relative_error"), lambda one: numbers.error(one[1].relative_error)),
                (Head("tolerance", "relative", "tolerance"), lambda one: numbers.error(one[1].tolerance)),
                (Head("verdict", number=False), lambda one: VERDICTS[one[1].holds]),
            )
        ],
        terms=["checks[].relative_error", "checks[].tolerance"],
        legend=[("dot", "s1", "relative error"), ("rule", "s1", "tolerance")],
        notes=[*notes, *(f"Not checked: {reason}." for reason in reasons)],
        opened=True,
    )


def _forms(report: MatrixReport) -> Figure:
    rows = report.matrices
    return Figure(
        key="matrices",
        title="The paper's matrices: what they are, their shape and how dense they are",
        says="Density is counted where built; expected is what the form and the mask leave if no weight is zero. "
        + NORMS,
        tables=[
            table_by(
                "matrices[]",
                rows,
                (Head("matrix", number=False), lambda row: row.name),
                (Head("what it is", path="formula", number=False, long=True), lambda row: row.formula),
                (Head("shape"), lambda row: " x ".join(str(side) for side in row.shape)),
                Column(("density", "%"), "density", numbers.percent),
                Column(("expected", "%"), "expected_density", numbers.percent),
                (Head("as", number=False), lambda row: row.expected_formula or numbers.ABSENT),
                notes=[
                    f"No density: {reason}."
                    for reason in dict.fromkeys(row.reasons.get("density") for row in rows if row.density is None)
                    if reason
                ],
            )
        ],
        terms=["matrices[].density", "matrices[].expected_density"],
    )


def network_sheet(report: NetworkReport, beside: Sequence[NetworkReport]) -> Sheet:
    tiles = [
        Tile("Eq. 33, from the matrices alone", numbers.error(report.whole_error), "relative", "whole_error"),
        Tile("side of W'_{j,1}", str(report.side), "", "side"),
    ]
    size = f"N = {report.tokens}, M = {report.hidden_size}: W'_{{j,1}} is {report.side} x {report.side}"
    lists = [("Not as in the paper", report.deviations)]
    return sheet_of(report, [report.prompt], tiles, lists, [_layers(report, beside)], more=[size])


def _layers(report: NetworkReport, beside: Sequence[NetworkReport]) -> Figure:
    """A plot of errors over layers; errors of exactly zero have no place on the axis."""
    rows = report.layers
    every = [column.value(row) for one in beside for row in one.layers for column, _ in _LINES]
    plot = Plot(
        Axis("layer j", Band([str(row.layer) for row in rows])),
        Axis("relative error", Log.over([*every, *(one.certificate.tolerance for one in beside)])),
    )
    drawn = [level(plot, report.certificate.tolerance, f"tolerance {report.certificate.tolerance:.0e}")]
    layers = [f"layer {row.layer}" for row in rows]
    for column, series in _LINES:
        values = [column.value(row) or None for row in rows]
        drawn += curve(plot, values, series, layers, column.name, numbers.error)
    return Figure(
        key="layers",
        title="How exact the network of the paper's matrices is, layer by layer",
        says="x'_j = W'_{j,1} x'_0 + b'_{j,3} + sum_k W'_{k,3} sigma(W'_{k,2} x'_0 + b'_{k,2}) with sigma live, "
        "against the model's own values.",
        picture=plot.svg(drawn, "Lines of errors over layers, and the tolerance."),
        tables=[
            table_of(
                rows, Head("layer", number=False), lambda row: f"{row.layer} (Eq. {row.equation})", _LAYER, "layers[]"
            )
        ],
        terms=[f"layers[].{column.path}" for column, _ in _LINES],
        legend=[*(("line", series, column.name) for column, series in _LINES), ("rule", "s1", "tolerance")],
        notes=["An error of 0 has no place on this axis."] if 0 in every else [],
        opened=True,
    )
