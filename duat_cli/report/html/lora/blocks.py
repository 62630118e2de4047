"""What the change does on prompts: W' of every block, and the answers prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import stacked, table_of_blocks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Linear
from duat_cli.report.html.drawing.table import Head, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, on_page
from duat_cli.report.tables.lora import BLOCK_COLUMNS, PROMPT_COLUMNS
from duat_cli.results.lora import LoraReport

_PARTS = (
    ("operator.routing", "s1", "routing: what attention looks at"),
    ("operator.weights", "s2", "weights: what it carries"),
    ("operator.interaction", "s3", "interaction of both"),
)
_POINTS = (("operator.relative_change", "the whole change", False),)
_BLOCK = (
    *on_page(BLOCK_COLUMNS),
    Column(("certificate, base", "relative"), "base_certificate", numbers.error),
    Column(("certificate, tuned", "relative"), "tuned_certificate", numbers.error),
)


def operator(report: LoraReport, beside: Sequence[LoraReport]) -> Figure | None:
    """Bars of three parts over blocks, and a point for the whole."""
    if not report.blocks or all(block.operator.relative_change is None for block in report.blocks):
        return None
    every = [block for other in beside for block in other.blocks or []]
    about = "Stacked bars over blocks: routing, weights, interaction."
    return Figure(
        key="operator",
        wide=True,
        title="What changed W' of each block: routing, weights, and both together",
        says="The three add up to the change as matrices. Their norms, stacked here, need not: the point is the norm "
        "of the whole change, and it lies below the bar where parts cancel.",
        picture=stacked(report.blocks, every, _PARTS, "change (% of W' of the base)", about, _POINTS),
        tables=[table_of_blocks(report.blocks, _BLOCK)],
        terms=["blocks[].operator.relative_change", *(f"blocks[].{path}" for path, _, _ in _PARTS)],
        legend=[*(("bar", series, name) for _, series, name in _PARTS), ("dot", "s4", "the whole change")],
    )


def prompts(report: LoraReport, beside: Sequence[LoraReport]) -> Figure | None:
    """A point a prompt: the base's loss across, the tuned model's upwards."""
    if not report.by_prompt:
        return None
    rows = report.by_prompt
    losses = [v for other in beside for p in other.by_prompt or [] for v in (p.loss_base, p.loss_tuned)]
    scale = Linear.over(losses, zero=False)
    plot = Plot(Axis("loss of the base (nats a token)", scale), Axis("loss, tuned (nats a token)", scale), 500, 330)
    drawn = [marks.rule(plot.left, plot.bottom, plot.right, plot.top, "the same loss")]
    for row in rows:
        if row.loss_base is not None and row.loss_tuned is not None:
            said = f"prompt {row.prompt}: {numbers.plain(row.loss_base)}, tuned {numbers.plain(row.loss_tuned)}"
            drawn.append(marks.dot(plot.x(row.loss_base), plot.y(row.loss_tuned), "s1", said))
    return Figure(
        key="prompts",
        title="What it does to the loss, prompt by prompt",
        says="Below the dashed line the tuned model is better.",
        picture=plot.svg(drawn, "A point for each prompt: loss of the base and of the tuned model."),
        tables=[table_of(rows, Head("prompt"), lambda one: str(one.prompt), on_page(PROMPT_COLUMNS), "by_prompt[]")],
        terms=["by_prompt[].kl", "by_prompt[].loss_base", "by_prompt[].loss_tuned", "by_prompt[].output"],
    )
