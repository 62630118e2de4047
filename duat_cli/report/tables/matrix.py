"""`duat matrix` as text for a terminal: a small case to follow with the paper at hand. With `--network`: the equations
layer by layer, with the error of each against the model."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import GAP, Column, Labels, missing, packs, titled
from duat_cli.report.tables.page import BLANK, Page, cut, heading, item, line, note
from duat_cli.results.matrix import MatrixCheck, MatrixForm, MatrixReport, NetworkLayer, NetworkReport
from duat_cli.text import plural

_LONGEST_TOKEN = 12
_STYLES = {True: "green", False: "bold red", None: "dim"}
NORMS = (
    "S: scales of the norms in front of attention and behind it, one a token; V_h, O_h: W_V and W_O of head h with the "
    "gains of these norms. The paper has no norms."
)
VERDICTS = {True: "holds", False: "FAILS", None: "not checked"}


def render_matrix(report: MatrixReport, page: Page) -> str:
    """The report as text: the matrices, a corner of W'_HVO, the coupling of the first tokens, and the checks."""
    return page.render(
        *facts.loaded(report.model, [report.prompt], report.environment),
        line(_case(report)),
        BLANK,
        *_forms(report.matrices, page),
        *_papers(report.matrices),
        BLANK,
        *_corner(report, page),
        BLANK,
        *_coupling(report, page),
        BLANK,
        *_convolution(report, page),
        BLANK,
        *_checks(report.checks, page),
        BLANK,
        facts.verdict(report.certificate),
        *facts.section("warnings", report.warnings, "yellow"),
    )


def _case(report: MatrixReport) -> str:
    return (
        f"block {report.layer} ({report.name}): N = {report.tokens}, M = {report.hidden_size}, "
        f"{facts.heads(report, 'kv')}, d = {report.head_width}; {origin(report)}"
    )


def origin(report: MatrixReport) -> str:
    """How V and O were found."""
    return f"W_V and W_O {'read from the weights' if report.factors == 'read' else 'found with unit vectors'}"


def _forms(forms: list[MatrixForm], page: Page) -> list[RenderableType]:
    built = "built entry by entry" if all(f.built for f in forms[:-1]) else "too large to build: in factors"
    title = heading(f"The paper's matrices, {built}")
    if page.narrow:
        return [title, *(item(_form(form)) for form in forms)]
    table = page.table()
    table.add_column("", no_wrap=True)
    table.add_column("\nwhat it is", overflow="fold", ratio=1)
    for header in ("\nshape", "density\n%", "expected\n%", "\nas"):
        table.add_column(header, justify="left" if header == "\nas" else "right", no_wrap=header != "\nas")
    for form in forms:
        density, expected = numbers.percent(form.density), numbers.percent(form.expected_density)
        cells = (form.name, form.formula, _shape(form), density, expected, form.expected_formula or "")
        table.add_row(*(Text(cell) for cell in cells))
    return [title, table]


def _papers(forms: list[MatrixForm]) -> list[RenderableType]:
    """Notes on the expected densities and on what the papers state, which differ."""
    legend = [note(text) for text in ("expected: what the form and the mask leave if no weight is zero.", NORMS)]
    return [BLANK, *legend, *facts.section("What the papers say", quoted(forms))]


def quoted(forms: list[MatrixForm]) -> list[str]:
    """Quotations from the papers, for each matrix that they say something about."""
    return [f"{form.name}: {form.papers}" for form in forms if form.papers]


def _form(form: MatrixForm) -> str:
    text = f"{form.name} = {form.formula}: {_shape(form)}"
    if form.density is None:
        return text
    expected = f"{numbers.percent(form.expected_density)} %, {form.expected_formula}"
    return f"{text}, density {numbers.percent(form.density)} % (expected: {expected})"


def _shape(form: MatrixForm) -> str:
    return " x ".join(str(side) for side in form.shape)


def _corner(report: MatrixReport, page: Page) -> list[RenderableType]:
    side = len(report.corner)
    title = f"W'_HVO, its top-left corner: {side} x {side} of block B_00, from token 0 to token 0"
    return _square(title, "", [str(i) for i in range(side)], report.corner, page)


def _coupling(report: MatrixReport, page: Page) -> list[RenderableType]:
    title = f"C_ij = |B_ij|_F between {mapped(report)}: into token i (row) from token j (column)"
    return _square(title, "i", token_labels(report), report.coupling, page)


def mapped(report: MatrixReport) -> str:
    """The tokens between which the coupling is shown, in words."""
    count = len(report.coupling)
    return f"the first {count} of {report.tokens} tokens" if count < report.tokens else "the tokens"


def _convolution(report: MatrixReport, page: Page) -> list[RenderableType]:
    beside = report.convolution
    title = f"The same of a 1-D convolution, k = {beside.width}, its weights drawn: only its zeros say anything"
    read = (
        f"An output token is made of {numbers.plain(beside.attention_tokens_read)} tokens by attention, of "
        f"{numbers.plain(beside.tokens_read)} by the convolution, mean over tokens."
    )
    return [*_square(title, "i", token_labels(report), beside.coupling, page), note(read)]


def token_labels(report: MatrixReport) -> list[str]:
    """Numbers of the tokens, with their texts in quotes, as most begin with a space; only numbers without texts."""
    texts = [cut(text, _LONGEST_TOKEN) for text in report.token_texts]
    return [f"{i} '{text}'" for i, text in enumerate(texts)] or [str(i) for i in range(len(report.coupling))]


def _square(
    title: str, corner: str, labels: Sequence[str], rows: Sequence[Sequence[float]], page: Page
) -> list[RenderableType]:
    """A square matrix of numbers; on a narrow page as several tables, each with a range of columns."""
    cells, heads = [[numbers.plain(value) for value in row] for row in rows], [str(k) for k in range(len(rows))]
    widths = [max(len(row[k]) for row in [heads, *cells]) + GAP for k in range(len(heads))]
    room = page.width - max(cell_len(label) for label in [corner, *labels])
    found: list[RenderableType] = [heading(title)]
    for part in packs(widths, room):
        table = page.table()
        table.add_column(corner, overflow="fold")
        for head in heads[part]:
            table.add_column(head, justify="right", no_wrap=True)
        for label, row in zip(labels, cells, strict=True):
            table.add_row(Text(label), *map(Text, row[part]))
        found.append(table)
    return found


def _checks(checks: list[MatrixCheck], page: Page) -> list[RenderableType]:
    title = heading("Checks, |left - right| / |right|")
    reasons = dict.fromkeys(reason for check in checks for reason in check.reasons.values())
    legend = [
        "The model's: the H V of its own forward pass and what that moves in its own block, biases left out.",
        "c: as many of the M columns as can be built. <> is the diamond product, W <> x = W^T x.",
    ]
    return [title, *_check_rows(checks, page), *(note(text) for text in legend), *map(item, reasons)]


def _check_rows(checks: list[MatrixCheck], page: Page) -> list[RenderableType]:
    if page.narrow:
        return [
            item(f"{c.statement}: {numbers.error(c.relative_error)}, {VERDICTS[c.holds]}", _STYLES[c.holds])
            for c in checks
        ]
    table = page.table()
    table.add_column("statement", overflow="fold", ratio=1)
    table.add_column("rel. error", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for check in checks:
        error, tolerance = numbers.error(check.relative_error), numbers.error(check.tolerance)
        verdict = Text(VERDICTS[check.holds], style=_STYLES[check.holds])
        table.add_row(Text(check.statement), error, tolerance, verdict)
    return [table]


# -- the network ---------------------------------------------------------------------------------------------

_LAYER = Labels(("layer", "j"), lambda row: f"{row.layer} (Eq. {row.equation})", False)
_EQ_33 = "x'_j = W'_{j,1} x'_0 + b'_{j,3} + sum_k W'_{k,3} sigma(W'_{k,2} x'_0 + b'_{k,2}), sigma live"
_ERRORS = "Against the model's own values: sigma reads W'_{j,2} x'_0 + b'_{j,2} (Eq. 34); what the FFN then gives; x_j."
LAYER_COLUMNS = [
    Column(("neurons", "/ token"), "neurons", numbers.whole, ("neurons", "a token")),
    Column(("sigma reads", "rel. error"), "pre_activation_error", numbers.error, ("what sigma reads", "relative")),
    Column(("FFN gives", "rel. error"), "unit_error", numbers.error, ("what the FFN gives", "relative")),
    Column(("x_j", "rel. error"), "output_error", numbers.error, ("the layer's output", "relative")),
]


def render_network(report: NetworkReport, page: Page) -> str:
    """The report on `--network` as text: a row per layer, Eq. 33 from the matrices alone, the certificate, and
    deviations from the paper."""
    return page.render(
        *facts.loaded(report.model, [report.prompt], report.environment),
        line(_network_case(report)),
        *titled(_EQ_33, report.layers, _LAYER, LAYER_COLUMNS, page, _ERRORS),
        *facts.absences(missing(report.layers, LAYER_COLUMNS, [row.layer for row in report.layers]), "layer"),
        BLANK,
        line(f"Eq. 33 from the matrices alone, every W'_{{j,3}} made: {numbers.error(report.whole_error)} from x_L"),
        facts.verdict(report.certificate),
        *facts.section("Not as in the paper", report.deviations),
        *facts.remarks(report.skipped, report.warnings),
    )


def _network_case(report: NetworkReport) -> str:
    kinds = dict.fromkeys(_sigma(layer) for layer in report.layers if layer.activation is not None)
    sigma = f"; sigma: {', '.join(kinds)}" if kinds else ""
    return (
        f"{plural(len(report.layers), 'layer')}, N = {report.tokens}, M = {report.hidden_size}: "
        f"W'_{{j,1}} is {report.side} x {report.side}{sigma}"
    )


def _sigma(layer: NetworkLayer) -> str:
    name = f"{layer.activation}(gate) o up" if layer.gated else str(layer.activation)
    return name if layer.experts is None else f"{name} in {plural(layer.experts, 'expert')} a token"
