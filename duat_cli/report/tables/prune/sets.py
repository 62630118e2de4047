"""The sets of `duat prune-bound` as text: their terms, what they save, and what is guaranteed about them."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from duat_cli.kinds import names_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import KIND, NO_REASON, Column, filled, fits, titled, titled_named
from duat_cli.report.tables.page import BLANK, Page, heading, item, note
from duat_cli.report.tables.prune.notable import WHOSE, saving
from duat_cli.report.tables.prune.repair import repair
from duat_cli.report.tables.prune.rivals import rivals
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import HeldOut, Plan
from duat_cli.text import exactly

UNITS = {"hidden": "rel.", "kl": "nats", "nll": "nats"}  # short forms for headers
PICTURE_WIDTH = 40
NAMED_TERMS = 12  # a longer set is not printed


def sets(report: PruneReport, page: Page) -> list[RenderableType]:
    """Tables of the largest sets within the budget, on held-out prompts and with guarantees; and a picture."""
    return [*_plans(report, page), *_pictures(report, page)]


def _plans(report: PruneReport, page: Page) -> list[RenderableType]:
    unit = UNITS[report.protocol.metric]
    budget = numbers.plain(report.plans[0].budget) if report.plans else ""
    chosen = filled(report.plans, plan_columns(unit))
    roomy = [*chosen[:3], PARAMETERS, *chosen[3:]]
    beside = any(plan.removed for plan in report.plans) and fits(report.plans, KIND, roomy, page)
    title = f"Largest sets tried within the budget of {budget} {report.protocol.unit}"
    asked = next((plan for plan in report.plans if plan.remove is not None), None)
    if asked is not None:
        title = f"Sets asked to hold {numbers.percent(asked.remove)} % of {WHOSE[asked.parameters_of]} parameters"
    title += ", by the mean over the prompts that chose them"
    title += ", measured with repair" if any(plan.repair for plan in report.plans) else ""
    return [
        *titled(title, report.plans, KIND, roomy if beside else chosen, page),
        *_unsized(report.plans),
        *_held(report.plans),
        *_stored(report.plans),
        *_rounds(report, page, unit),
        *_held_out(report, page, unit),
        *rivals(report, page, unit),
        *_pooled(report, page),
        *repair(report, page, unit),
        BLANK,
        heading("Guarantee"),
        *(item(text) for plan in report.plans for text in guarantees(plan, report)),
    ]


def _unsized(plans: list[Plan]) -> list[RenderableType]:
    """Notes on why what a set saves is not counted."""
    zeroed = dict.fromkeys(p.saves.reasons["parameters_zeroed"] for p in plans if p.saves and p.saves.reasons)
    gone = dict.fromkeys(p.reasons["saves"] for p in plans if p.removed and p.saves is None)
    return [
        *(note(f"Parameters zeroed: not counted; {why}") for why in zeroed),
        *(note(f"Parameters removed and zeroed: not counted; {why}") for why in gone),
    ]


def _held(plans: list[Plan]) -> list[RenderableType]:
    """Notes on the parameters that sets hold, for sets of several kinds or of a given size."""
    return [
        note(
            f"{plan.granularity}: the {plan.removed} terms hold {numbers.plain(plan.parameters / 1e6)} M parameters, "
            f"{numbers.percent(plan.parameters_share)} % of {WHOSE[plan.parameters_of]}"
            + (", ordered by predicted damage a parameter." if "," in plan.granularity else ".")
        )
        for plan in plans
        if plan.removed and (plan.remove is not None or "," in plan.granularity)
    ]


def _stored(plans: list[Plan]) -> list[RenderableType]:
    """A note on why saved and zeroed parameters may be fewer than the terms hold, if so."""
    sizes = [(plan, plan.saves, plan.saves.parameters_zeroed) for plan in plans if plan.saves]
    if not any(zeroed and saves.parameters_removed + zeroed < plan.parameters for plan, saves, zeroed in sizes):
        return []
    text = (
        "Saved and zeroed can come to less than the terms hold: a term that does not leave the file is zeroed in its "
        "last layer alone, and what it reads with is stored as it was."
    )
    return [note(text)]


def _rounds(report: PruneReport, page: Page, unit: str) -> list[RenderableType]:
    """Table of the sets after each round, compared with a single round."""
    rows = [(plan.granularity, one) for plan in report.plans for one in plan.rounds]
    title = f"Sketched again after each round, beside one round, {report.protocol.unit}"
    return titled_named(title, rows, round_columns(unit), page)


def round_columns(unit: str) -> list[Column]:
    return [
        Column(("rounds,", "terms"), "removed", numbers.whole),
        Column(("measured", unit), "measured", numbers.plain),
        Column(("one round,", "terms"), "single_removed", numbers.whole),
        Column(("measured", unit), "single_measured", numbers.plain),
    ]


def _held_out(report: PruneReport, page: Page, unit: str) -> list[RenderableType]:
    """Table of sets on prompts that did not choose them: the guaranteed one, the next, and the chosen one."""
    rows = []
    for plan in report.plans:
        removed = plan.guarantee.removed if plan.guarantee else 0
        failed = next((one for one in plan.held_out if one.removed > removed), None)
        for one in plan.held_out:
            titles = [("guaranteed", one.removed == removed), ("first to fail", one is failed)]
            titles.append(("chosen", one is plan.held_out[-1]))
            said = [title for title, holds in titles if holds]
            if said:
                rows.append((f"{plan.granularity}, {' and '.join(said)}", one))
    return titled_named(f"Sets on held-out prompts, {report.protocol.unit}", rows, held_out_columns(unit), page)


def _pooled(report: PruneReport, page: Page) -> list[RenderableType]:
    """Table of how far sets turn the output of an embedder."""
    if not report.pooled:
        return []
    shown = filled(report.pooled, POOLED_COLUMNS)
    title = f"Cosine of the pooled outputs with and without the set ({report.pooled[0].pooling})"
    return titled(title, report.pooled, KIND, shown, page)


def plan_columns(unit: str) -> list[Column]:
    return [
        Column(("removed", "terms"), "removed", numbers.whole),
        Column(("of", "terms"), "of", numbers.whole),
        Column(("share,", "terms", "%"), "share", numbers.percent, ("share of terms", "%")),
        Column(("predicted", unit), "predicted", numbers.plain),
        Column(("measured", unit), "measured", numbers.plain),
        Column(("saved", "M param."), "saves.parameters_removed", millions),
        Column(("saved", "MB"), "saves.bytes_removed", millions),
        Column(("zeroed", "M param."), "saves.parameters_zeroed", millions),
    ]


PARAMETERS = Column(("share,", "param.", "%"), "parameters_share", numbers.percent, ("share of parameters", "%"))


def held_out_columns(unit: str) -> list[Column]:
    return [
        Column(("removed", "terms"), "removed", numbers.whole),
        Column(("share,", "terms", "%"), "share", numbers.percent, ("share of terms", "%")),
        Column(("mean", unit), "mean", numbers.plain, ("held-out mean", unit)),
        Column(("9 of 10 at", f"most, {unit}"), "percentile_90", numbers.plain, ("9 of 10 at most", unit)),
        Column(("over", "budget, %"), "share_exceeded", numbers.percent, ("over budget", "%")),
        Column(("run on", "prompts"), "prompts", numbers.whole),
    ]


_cosine = numbers.fixed(4)
POOLED_COLUMNS = [
    Column(("removed", "terms"), "removed", numbers.whole),
    Column(("mean", "cosine"), "mean", _cosine),
    Column(("lowest", "cosine"), "lowest", _cosine),
    Column(("held out,", "mean cosine"), "held_out_mean", _cosine),
    Column(("held out,", "lowest"), "held_out_lowest", _cosine),
]


def millions(value: float | None) -> str:
    return numbers.ABSENT if value is None else numbers.plain(value / 1e6)


def guarantees(plan: Plan, report: PruneReport) -> list[str]:
    """All guarantees for a plan's sets: for single prompts, for the mean, and for a set of a given size."""
    return [_guarantee(plan, report), *_mean_guarantee(plan), *_limit(plan)]


def _mean_guarantee(plan: Plan) -> list[str]:
    """The statement about the mean damage, if there is one."""
    given = plan.mean_guarantee
    if given is None:
        return []
    if not given.removed:
        one = _of_size(plan, given.tested[0])
        few = ""
        if one is not None and one.mean <= given.budget:
            few = f": on {one.prompts} held-out prompts it is, too few to show it"
        return [f"{plan.granularity}, mean: none; that of {given.tested[0]} is not shown to be within the budget{few}"]
    above = f"{given.counted_for_less or 'none'} of {given.holdout_prompts}"
    above += f" {'is' if given.counted_for_less < 2 else 'are'} above that."
    return [
        f"{plan.granularity}, mean: with {exactly(given.confidence)}% confidence, removing {given.removed} of "
        f"{plan.of} has a mean damage within the budget ({numbers.plain(given.mean)} on the held-out prompts). "
        f"Each prompt's damage is capped at {numbers.plain(given.most)} for this test; {above}"
    ]


def _limit(plan: Plan) -> list[str]:
    """The damage that few prompts exceed, for a set of a given size."""
    last = plan.held_out[-1] if plan.held_out else None
    if plan.remove is None or plan.guarantee is None or last is None or last.limit is None:
        return []
    given = plan.guarantee
    return [
        f"{plan.granularity}, all {last.removed}: with {exactly(given.confidence)}% confidence, at most "
        f"{exactly(given.share_above_limit)}% of prompts have a damage above {numbers.plain(last.limit)}."
    ]


def _guarantee(plan: Plan, report: PruneReport) -> str:
    """The statement about single prompts, or why there is none."""
    given = plan.guarantee
    if given is None:
        return f"{plan.granularity}: none; {plan.reasons.get('guarantee', NO_REASON)}"
    if not given.removed:
        which = f"the first set tested, {given.tested[0]} of the {plan.removed}"
        which = which if len(given.tested) > 1 else f"the one set tested, of {given.tested[0]}"
        tried = f"{plan.granularity}: none; {which}, exceeded the"
        one = _of_size(plan, given.tested[0])
        if one is None or given.may_exceed is None:
            return f"{tried} budget too often"
        may = f"{given.may_exceed or 'none'} of {given.holdout_prompts} may"
        return f"{tried} budget on {one.exceeded} of {one.prompts} held-out prompts; {may}"
    which = ", ".join(given.set) if len(given.set) <= NAMED_TERMS else "--json or --export"
    said = " ".join(filter(None, (saving(plan, given.saves), f"Which: {which}")))
    return (
        f"{plan.granularity}: with {exactly(given.confidence)}% confidence, removing {given.removed} of "
        f"{plan.of} exceeds the budget on at most {exactly(given.share_above_limit)}% of prompts "
        f"({given.exceeded} of {given.holdout_prompts} "
        f"held-out prompts did). {said}"
    )


def _of_size(plan: Plan, removed: int) -> HeldOut | None:
    return next((one for one in plan.held_out if one.removed == removed), None)


def _pictures(report: PruneReport, page: Page) -> list[RenderableType]:
    """A picture of damage against the share removed, for the plan with most terms."""
    plans = [plan for plan in report.plans if len(plan.curve) > 2]
    if not plans:
        return []
    plan = max(plans, key=lambda p: p.of)
    top = max(max(point.predicted, point.measured or 0.0) for point in plan.curve)
    full, half = ("█", "▌") if page.boxes else ("#", "")
    width = max(10, min(PICTURE_WIDTH, page.width - 40))
    rows = [
        f"{numbers.percent(point.share):>6} % {numbers.plain(point.predicted):>9} {numbers.plain(point.measured):>9}  "
        + _bar(point.measured or 0.0, top, width, full, half)
        for point in plan.curve
    ]
    head = f"{'removed':>8} {'predicted':>9} {'measured':>9}"
    return [
        BLANK,
        heading(
            f"Damage, {report.protocol.unit}, against the share of {names_of(plan.granularity)} removed, "
            f"least damaging first (bars: measured{', without repair' if plan.repair else ''})"
        ),
        Text(head),
        *(Text(row.rstrip()) for row in rows),
    ]


def _bar(value: float, top: float, width: int, full: str, half: str) -> str:
    halves = round(2 * width * max(value, 0.0) / top) if top > 0 else 0
    return full * (halves // 2) + half * (halves % 2)


TABLES = {
    "pooled[].": POOLED_COLUMNS,
    "plans[].": [*plan_columns(""), PARAMETERS],
    "plans[].held_out[].": held_out_columns(""),
    "plans[].rounds[].": round_columns(""),
}
