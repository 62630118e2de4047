"""The sheet of `duat lora-diff`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import facts
from duat_cli.report.html.drawing.figure import Figure, Sheet, Verdict
from duat_cli.report.html.drawing.table import Head, Table, table_by
from duat_cli.report.html.lora.blocks import operator, prompts
from duat_cli.report.html.lora.modules import compared, intruders, norms, spectra
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.lora import LoraReport
from duat_cli.results.prompts import all_prompts
from duat_cli.text import plural

_TILES = (
    Column(("change of the weights", "%"), "summary.relative_frobenius", numbers.percent),
    Column(("its norm", "of dW"), "summary.frobenius_norm", numbers.plain),
    Column(("KL of the answers", "nats"), "summary.kl", numbers.plain),
    Column(("loss", "nats a token"), "summary.loss_change", numbers.signed(numbers.plain)),
)


def lora_sheet(report: LoraReport, beside: Sequence[LoraReport]) -> Sheet:
    """beside: all lora-diff reports of the page, this one among them: they share their axes."""
    two = report.other_modules is not None
    figures = [
        operator(report, beside),
        prompts(report, beside),
        _eq18(report),
        *(
            picture(report.modules, "modules", f": {report.tuned}" if two else "")
            for picture in (norms, spectra, intruders)
        ),
        compared(report),
    ]
    if report.other_modules is not None:
        other = f": {report.comparison.other}" if report.comparison else ": the second adapter"
        figures += [picture(report.other_modules, "other_modules", other) for picture in (norms, spectra, intruders)]
    figures.append(_lint(report))
    return Sheet(
        command=report.command,
        name=f"{report.base} and {report.tuned}",
        facts=_facts(report),
        verdict=_verdict(report),
        tiles=facts.tiles(report, _TILES),
        lists=[
            ("Notable", report.summary.notable),
            facts.skipped(report.skipped),
            ("Warnings", report.warnings),
            ("Held and not changed", report.unchanged),
            ("Not in the base", report.added),
            ("Only in the base", report.removed),
        ],
        figures=[figure for figure in figures if figure is not None],
    )


def _facts(report: LoraReport) -> list[str]:
    changed = report.summary.changed
    what = "checked only" if changed is None else f"{plural(changed, 'parameter')} changed"
    what += f", {len(report.reshaped)} of another shape, not compared" if report.reshaped else ""
    found = [f"{report.mode}: {report.method} on {report.dtype} weights, {what}"]
    if report.model is not None and report.environment is not None and report.prompts is not None:
        found += facts.loaded(report.model, report.environment, all_prompts(report))
    return found


def _verdict(report: LoraReport) -> Verdict | None:
    """The certificates of both models, and what the linter found."""
    errors = [finding for finding in report.lint if finding.level == "error"]
    lint = f"; {plural(len(errors), 'error')} of the linter" if errors else ""
    both = [c for c in (report.certificate, report.tuned_certificate) if c is not None]
    if not both:
        return Verdict("bad", "ERRORS", lint.removeprefix("; ")) if errors else None
    worst = max(max(c.relative_error, c.plain_error) for c in both)
    text = f"largest relative error {numbers.error(worst)}, of the base and of the tuned model{lint}"
    if all(c.exact for c in both) and not errors:
        return Verdict("good", "exact", text)
    return Verdict("bad", "ERRORS" if all(c.exact for c in both) else "NOT EXACT", text)


def _eq18(report: LoraReport) -> Figure | None:
    found = report.eq18
    if found is None:
        return None
    word = {True: "holds", False: "does NOT hold", None: "was not tested"}[found.holds]
    rows = [
        ["the sum", numbers.error(found.relative_error), numbers.error(found.tolerance)],
        ["the change alone", numbers.error(found.change_error), numbers.error(found.change_tolerance)],
    ]
    return Figure(
        key="eq18",
        title=f"Eq. 18, in the FFNs' linear layers: {word}",
        says=f"{found.statement}. Tested on up to {plural(found.inputs, 'input')} a layer.",
        tables=[Table([Head("what", number=False), Head("error", "relative"), Head("tolerance", "relative")], rows)],
        terms=["eq18", "eq18.relative_error", "eq18.change_error"],
        notes=[
            *([f"It fails of {', '.join(found.failed)}."] if found.failed else []),
            *(f"{one.what} was not tested: {one.why}." for one in found.not_covered),
        ],
    )


def _lint(report: LoraReport) -> Figure | None:
    if not report.lint:
        return None
    return Figure(
        key="lint",
        wide=True,
        title="What the linter found",
        says="Faults that go wrong in practice.",
        tables=[
            table_by(
                "lint[]",
                report.lint,
                (Head("level", path="level", number=False), lambda one: one.level),
                (Head("rule", path="rule", number=False), lambda one: one.rule),
                (Head("where", path="where", number=False), lambda one: one.where),
                (Head("what", path="message", number=False, long=True), lambda one: one.message),
            )
        ],
        terms=["lint"],
    )
