"""The sheet of `duat matrix`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import facts
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, Verdict
from duat_cli.report.html.drawing.table import Head, table_by
from duat_cli.report.html.matrix.checks import checks
from duat_cli.report.html.matrix.maps import convolution, corner, coupling
from duat_cli.report.tables import numbers
from duat_cli.report.tables.facts import heads, named
from duat_cli.report.tables.grid import Column
from duat_cli.report.tables.matrix import NORMS
from duat_cli.results.matrix import MatrixReport


def matrix_sheet(report: MatrixReport, beside: Sequence[MatrixReport]) -> Sheet:
    """beside: all matrix reports of the page, this one among them: their errors share an axis."""
    return Sheet(
        command=report.command,
        name=f"{named(report.model)}, block {report.layer}",
        facts=[*facts.loaded(report.model, report.environment, [report.prompt]), _case(report)],
        verdict=_verdict(report),
        tiles=[
            Tile("tokens", str(report.tokens), "N", "tokens"),
            Tile("width", str(report.hidden_size), "M", "hidden_size"),
            Tile("certificate", numbers.error(report.certificate.relative_error), "relative",
                 "certificate.relative_error"),
        ],
        lists=[
            ("What the papers say", [f"{form.name}: {form.papers}" for form in report.matrices if form.papers]),
            ("Warnings", report.warnings),
        ],
        figures=[coupling(report), convolution(report), corner(report), checks(report, beside), _forms(report)],
    )  # fmt: skip


def _case(report: MatrixReport) -> str:
    origin = "read from the weights" if report.factors == "read" else "found with unit vectors"
    built = "the matrices are built" if report.dense else "too large to build, so in factors"
    return (
        f"{report.name}: {heads(report, 'key/value')} of width d = {report.head_width}; W_V and W_O {origin}; {built}"
    )


def _verdict(report: MatrixReport) -> Verdict:
    """Of the certificate and the checks together."""
    plain = facts.verdict(report.certificate)
    failed = [check.name for check in report.checks if check.holds is False]
    made = sum(check.holds is not None for check in report.checks)
    if failed:
        return Verdict("bad", "FAILS", f"{', '.join(failed)}; {plain.word} {plain.text}")
    of = "" if made == len(report.checks) else f" of {len(report.checks)}"
    return Verdict(plain.state, plain.word, f"{plain.text}; {made}{of} checks hold")


def _forms(report: MatrixReport) -> Figure:
    rows = report.matrices
    return Figure(
        key="matrices",
        wide=True,
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
