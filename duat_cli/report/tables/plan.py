"""`duat plan` as text for a terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.page import BLANK, Page, heading, line
from duat_cli.results.plan import PlanReport, Way
from duat_cli.text import about, plural


def render_plan(report: PlanReport, page: Page) -> str:
    """The report as text: the weights, what each way takes at its peak, and the way that is chosen."""
    parts: list[RenderableType] = [heading(report.name), line(_weights(report)), line(_work(report)), BLANK]
    for way in report.ways:
        parts += [heading(_title(way, report)), _terms(way), BLANK]
    return page.render(*parts, _verdict(report), *facts.section("warnings", report.warnings, "yellow"))


def _weights(report: PlanReport) -> str:
    weights, block = report.weights, report.weights.largest_block
    text = f"weights {numbers.size(weights.stored_bytes)} as stored, {numbers.size(weights.bytes)} as {report.dtype}"
    if block is not None:
        text += f"; {plural(weights.blocks, 'block')}, the largest {block.name}: {numbers.size(block.bytes)}"
    outside = [f"{layer.name} {numbers.size(layer.bytes)}" for layer in weights.layers]
    return "; ".join([text, *outside, f"the rest {numbers.size(weights.frame_bytes)}"])


def _work(report: PlanReport) -> str:
    counts = report.prompt_tokens
    total = f"{plural(len(counts), 'prompt')}, {plural(sum(counts), 'token')}"
    where = "" if report.device == "cpu" else f" on {report.device}"
    return f"{report.planned_command}{where}, {total}: {numbers.count(report.operations)} operations in the blocks"


def _title(way: Way, report: PlanReport) -> str:
    reads = f"the weights read {numbers.plain(way.weight_reads)} times"
    room = "" if way.fits else f", more than {numbers.size(report.limit_bytes)}"
    time = "" if way.seconds is None else f"; {about(way.seconds)}"
    among = f" in {way.processes} processes" if way.processes > 1 else ""
    return f"{way.weights}{among}: {numbers.size(way.peak_memory_bytes)} at its peak{room}; {reads}{time}"


def _terms(way: Way) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for term in way.terms:
        table.add_row(numbers.size(term.bytes), line(term.what))
    return table


def _verdict(report: PlanReport) -> Text:
    if report.chosen is None:
        return line(f"cannot run: {report.reason}", "bold red")
    there = numbers.size(report.limit_bytes)
    return line(f"{report.planned_command} runs {report.chosen}; {there} may be taken", "green")
