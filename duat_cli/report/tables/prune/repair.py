"""Effects of repair as text: the damage of sets without and with it; and a written checkpoint compared with the model
that it was made from."""

from __future__ import annotations

from rich.console import RenderableType

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, titled_named
from duat_cli.report.tables.page import BLANK, Page, heading, item, note
from duat_cli.results.prune.repair import RepairedSet, SetRepair
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import Plan
from duat_cli.results.prune.written import Written
from duat_cli.text import plural


def repair(report: PruneReport, page: Page, unit: str) -> list[RenderableType]:
    """Table and notes for every plan: what was refitted, and its sets on held-out prompts and in-sample."""
    plans = [(plan, plan.repair) for plan in report.plans if plan.repair is not None]
    rows = [(f"{plan.granularity}, {title}", one) for plan, found in plans for title, one in _sets(plan, found)]
    if not rows:
        return []
    return [
        *titled_named(
            f"Repair: damage without it and with it, {report.protocol.unit}", rows, repair_columns(unit), page
        ),
        *(item(f"{plan.granularity}: {_refitted(found)}{left_out(plan, found)}") for plan, found in plans),
        note(
            "in-sample: the prompts that chose the set; without --calibration layers are fitted to them as well. "
            "held out: prompts that took no part. 9 of 10: have at most that damage. over: share of prompts over the "
            "budget."
        ),
    ]


def _sets(plan: Plan, found: SetRepair) -> list[tuple[str, RepairedSet]]:
    """Titles and rows: the chosen set in-sample, and the guaranteed and the chosen set on held-out prompts."""
    rows = [("in-sample", one) for one in found.chosen_on if one.removed == plan.removed]
    guaranteed = plan.guarantee.removed if plan.guarantee else 0
    for one in found.held_out:
        if one.removed in (guaranteed, plan.removed):
            rows.append(("held out", one))
    return rows


def _refitted(found: SetRepair) -> str:
    layers = f"{plural(found.refitted, 'layer')} of the chosen set refitted"
    are = "it is" if found.unchanged == 1 else "they are"
    kept = f", {found.unchanged} left as {are}: no refit was better on tokens held back" if found.unchanged else ""
    prompts = plural(found.calibration_prompts, "prompt")
    fitted = f"{plural(found.calibration_tokens, 'token')} of {prompts}"
    return f"{layers} to {fitted}{kept}"


def left_out(plan: Plan, found: SetRepair) -> str:
    """A remark if the repair of the plan's set was left out; otherwise empty."""
    if not any(one.dropped for one in found.chosen_on if one.removed == plan.removed):
        return ""
    return "; the repair was left out, because it did not lower the damage: the set is as without it"


def repair_columns(unit: str) -> list[Column]:
    return [
        Column(("removed", "", "terms"), "removed", numbers.whole),
        Column(("share", "", "%"), "share", numbers.percent),
        Column(("mean", "without", unit), "mean_before", numbers.plain, ("mean before", unit)),
        Column(("mean", "with", unit), "mean_after", numbers.plain, ("mean repaired", unit)),
        Column(("9 of 10", "without", unit), "percentile_90_before", numbers.plain, ("9 of 10 before", unit)),
        Column(("9 of 10", "with", unit), "percentile_90_after", numbers.plain, ("9 of 10 repaired", unit)),
        Column(("over", "without", "%"), "share_exceeded_before", numbers.percent, ("over budget before", "%")),
        Column(("over", "with", "%"), "share_exceeded_after", numbers.percent, ("over budget repaired", "%")),
        Column(("run on", "", "prompts"), "prompts", numbers.whole),
    ]


TABLES = {"plans[].repair.held_out[].": repair_columns(""), "plans[].repair.chosen_on[].": repair_columns("")}


def written(report: PruneReport) -> list[RenderableType]:
    """Lines on size, damage, perplexity and time, before and after; nothing without --apply."""
    found = report.written
    if found is None:
        return []
    kind = "term" if "," in found.granularity else found.granularity
    title = f"Written: a checkpoint without {plural(found.terms, kind)}"
    parts = [_size(found), _damage(found, report.protocol.unit, report.plans[0].budget), _perplexity(found)]
    if found.parameters_after < found.parameters_before:  # otherwise the same work was timed twice
        parts.append(_time(found))
    return [BLANK, heading(title + (", repaired" if found.repaired else "")), *map(item, parts)]


def _size(found: Written) -> str:
    return (
        f"{found.gone}: {found.parameters_before:,} -> {found.parameters_after:,} parameters, "
        f"{numbers.plain(found.bytes_before / 1e6)} -> {numbers.plain(found.bytes_after / 1e6)} MB in {found.dtype}"
    )


def _damage(found: Written, unit: str, budget: float) -> str:
    """A line on the damage of the written file itself."""
    if found.damage is None:
        return f"damage: none; {found.reasons['damage']}"
    above = f"{found.exceeded} of {found.prompts} {_on(found)} above the budget of {budget:g}"
    return f"damage: {numbers.plain(found.damage)} {unit} on average, {above}"


def _on(found: Written) -> str:
    return "held-out prompts" if found.measured_on == "held out" else "of the prompts that chose the set"


def _perplexity(found: Written) -> str:
    before, after = found.perplexity_before, found.perplexity_after
    if before is None or after is None:
        return f"perplexity: none; {found.reasons.get('perplexity_before') or found.reasons['perplexity_after']}"
    on = f"{found.prompts} {_on(found)}, {found.tokens} tokens"
    return f"perplexity: {numbers.plain(before)} -> {numbers.plain(after)} ({on})"


def _time(found: Written) -> str:
    times = [numbers.plain(1e3 * seconds) for seconds in (found.seconds_before, found.seconds_after)]
    return (
        f"time: {times[0]} -> {times[1]} ms a token, measured: median of {found.timed_runs} alternating runs over "
        f"{found.timed_tokens} tokens"
    )
