"""The answer of `duat prune-bound` in a few sentences: what can be removed, at what damage, and what the file saves."""

from __future__ import annotations

import math

from duat_cli.kinds import NAMES, names_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import NO_REASON
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import Plan, SetSize

WHOSE = {"blocks": "the blocks'", "all": "the model's"}
UNIFORM = {"neuron", "head"}  # kinds that --uniform applies to
ENOUGH = 0.95  # a set has to hold at least this much of the share that was asked for


def notable(report: PruneReport) -> list[str]:
    """Sentences on the best set and what the file saves without it, on the other sets, and on what to run next."""
    plans = [plan for plan in report.plans if plan.removed]
    if not plans:
        return [_nothing(report)] if report.plans else []
    best = _best(plans)
    others = [_other(plan, report) for plan in plans if plan is not best]
    return [
        _answer(best, report, alone=not others),
        *([f"Other kinds: {'; '.join(others)}."] if others else []),
        *([] if report.written or _of_a_part(report) else _next(best, report)),
    ]


def _of_a_part(report: PruneReport) -> bool:
    """Whether --stack names a part of the model that is written as no checkpoint; encoders and decoders are."""
    return report.model.stack not in (None, "encoder", "decoder")


def _nothing(report: PruneReport) -> str:
    """Why no set was chosen; one sentence if no set of any kind stays within the budget."""
    plans = report.plans
    whys = [plan.reasons.get("predicted", NO_REASON) for plan in plans]
    if all(why.startswith("not even the least damaging") for why in whys):
        kinds = ", ".join(NAMES[kind] for plan in plans for kind in plan.granularity.split(","))
        budget = f"{numbers.plain(plans[0].budget)} {report.protocol.unit}"
        return f"Nothing can go: no set of {kinds} stays within the budget of {budget}."
    said = (f"{names_of(plan.granularity)}: {why}" for plan, why in zip(plans, whys, strict=True))
    return f"No set was chosen; {'; '.join(said)}."


def _best(plans: list[Plan]) -> Plan:
    """The best plan: the least damaging of sets with a given size, or the one with most parameters within a budget."""
    if plans[0].remove is None:
        return max(plans, key=lambda plan: plan.parameters_share)
    enough = [plan for plan in plans if plan.parameters_share >= ENOUGH * (plan.remove or 0.0)]
    return min(enough or plans, key=lambda plan: math.inf if (found := _damage(plan)) is None else found)


def _damage(plan: Plan) -> float | None:
    """Damage of the chosen set on held-out prompts or, without any, on those that chose it."""
    return plan.held_out[-1].mean if plan.held_out else plan.measured


def _answer(plan: Plan, report: PruneReport, *, alone: bool) -> str:
    unit, whose = report.protocol.unit, WHOSE[plan.parameters_of]
    repaired = " after repair" if plan.repair else ""
    held = f"{_terms(plan)} hold {numbers.percent(plan.parameters_share)} % of {whose} parameters"
    damage = f"the damage{repaired} is {numbers.plain(_damage(plan))} {unit} on {_where(plan)}"
    said = f"{_head(plan, report, alone=alone)}: {held}; {damage}, {_guaranteed(plan)}."
    return f"{said} {saving(plan, plan.saves)}{_short(plan, report)}".strip()


def _head(plan: Plan, report: PruneReport, *, alone: bool) -> str:
    names = names_of(plan.granularity)
    if plan.remove is None:
        head = f"Within the budget of {numbers.plain(plan.budget)} {report.protocol.unit}"
        return head if alone else f"{head} most can go as {names}"
    share = f"{numbers.percent(plan.remove)} % of {WHOSE[plan.parameters_of]} parameters"
    if plan.parameters_share < ENOUGH * plan.remove:
        return f"No set holds {share}" + ("" if alone else f"; {names} do the least damage")
    return f"To take out {share}" + ("" if alone else f", {names} do the least damage")


def _short(plan: Plan, report: PruneReport) -> str:
    """A sentence on the share of the model that leaves the file, and whether it is less than was asked for."""
    if plan.saves is None or not plan.saves.parameters_removed or not plan.parameters_share:
        return ""
    gone, whole = plan.saves.parameters_removed, plan.parameters / plan.parameters_share
    of = "decoder" if report.model.stack == "decoder" else "model"  # parameters are counted of what was read
    share = f" That is {numbers.percent(gone / report.model.parameters)} % of the {of}'s parameters"
    if plan.remove is None or gone >= ENOUGH * min(plan.remove * whole, plan.parameters):
        return f"{share}."
    return f"{share}, less than was asked for: the other terms are zeroed and still stored."


def _terms(plan: Plan) -> str:
    return f"{plan.removed} of {plan.of} {names_of(plan.granularity)}"


def _where(plan: Plan) -> str:
    return f"{plan.held_out[-1].prompts} held-out prompts" if plan.held_out else "the prompts that chose the set"


def _guaranteed(plan: Plan) -> str:
    given = plan.guarantee
    if given is None:
        return "and nothing is guaranteed without held-out prompts"
    budget = f"the budget of {numbers.plain(given.budget)}"
    if given.removed == plan.removed:
        return f"guaranteed {given.share_exceeding} exceed {budget}"
    fewer = "no smaller set that was tested is"
    if given.removed:
        fewer = f"{given.removed} of them {'is' if given.removed == 1 else 'are'}"
    return f"not guaranteed to keep to {budget} ({fewer})"


def saving(plan: Plan, saves: SetSize | None) -> str:
    """A sentence on what a file without a set of the plan saves; empty where that is not known."""
    if saves is None:
        return ""
    if saves.parameters_removed:
        millions = numbers.plain(saves.parameters_removed / 1e6)
        return f"It saves {millions} M parameters, {numbers.decimal(saves.bytes_removed)} in the file."
    if can_leave := _can_leave(plan):
        return f"It saves nothing in the file: {can_leave} can leave only with --uniform."
    if saves.parameters_zeroed is None:
        return f"No checkpoint without it can be written: {saves.reasons['parameters_zeroed']}."
    return "It saves nothing in the file: what is removed is stored as zeros."


def _other(plan: Plan, report: PruneReport) -> str:
    given, saves = plan.guarantee, plan.saves
    said = [f"damage {numbers.plain(_damage(plan))} {report.protocol.unit}"]
    if given is not None:
        said.append("guaranteed" if given.removed == plan.removed else "not guaranteed")
    if saves is not None:
        smaller = f"{numbers.decimal(saves.bytes_removed)} less in the file"
        said.append(smaller if saves.parameters_removed else "nothing less in the file")
    return f"{_terms(plan)} ({numbers.percent(plan.parameters_share)} % of the parameters), {', '.join(said)}"


def _next(best: Plan, report: PruneReport) -> list[str]:
    """A sentence on the options that write a checkpoint, if possible for a kind of which something leaves the file; or,
    where weights were read block by block, the set alone."""
    plan = next((p for p in (best, *report.plans) if p.removed and (_can_leave(p) or _saves(p))), best)
    if report.protocol.ablate == "mean" and not set(plan.granularity.split(",")) <= UNIFORM:
        return []  # no bias can hold means of other kinds
    leaving = _can_leave(plan)
    options = [
        f"--granularity {plan.granularity}",
        *(["--uniform"] if leaving or plan.uniform else []),
        plan.remove_option or f"--budget {plan.budget:g}",
        "--export FILE.json" if report.streamed or not (leaving or _writable(plan)) else "--apply DIR",
    ]
    can = f"so that {leaving} can leave the file; the damage is then another."
    why = f" --uniform takes as many from every block, {can}" if leaving else ""
    memory = " --apply needs all weights in memory." if report.streamed else ""
    return [f"Next: the same command with {' '.join(options)}.{why}{memory}"]


def _can_leave(plan: Plan) -> str:
    """The names of the plan's terms that can leave the file where --uniform chooses the set; empty: none, or it did."""
    kinds = [] if plan.saves is None or plan.uniform else plan.saves.uniform_leaves
    return names_of(",".join(kinds)) if kinds else ""


def _writable(plan: Plan) -> bool:
    """Whether a file can hold the model without the plan's set; True where that is not known."""
    return plan.saves is None or _saves(plan) or plan.saves.parameters_zeroed is not None


def _saves(plan: Plan) -> bool:
    return plan.saves is not None and plan.saves.parameters_removed > 0
