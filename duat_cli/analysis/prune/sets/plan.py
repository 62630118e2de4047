"""A chosen set as the report states it: its terms, what it saves, and what held-out prompts showed about it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from duat_cli.analysis.plan.task import NO_HOLDOUT, PruneOptions
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.order import Sizes
from duat_cli.analysis.prune.sets.trial import Trial
from duat_cli.errors import or_reason
from duat_cli.kinds import names_of
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.repair import SetRepair
from duat_cli.results.prune.rivals import CriterionSet
from duat_cli.results.prune.sets import CurvePoint, Guarantee, HeldOut, MeanGuarantee, Plan, SetSize

ONE_BLOCK = "the model has one block, and one has to stay"
NO_REPAIR = "--repair was not given"
NONE_UNIFORM = "--uniform leaves no set: it takes as many terms from every FFN or attention, and never all of one"
NOTHING_FITS = "not even the least damaging set stays within the budget"
METHOD = "Clopper-Pearson limit of nested sets tested in order, from the smallest, on held-out prompts"
MEAN_METHOD = "betting (Waudby-Smith & Ramdas 2023) on nested sets in order, from the smallest, on held-out prompts"

SizeOf = Callable[[Sequence[TermId]], SetSize]


def name_of(term: TermId) -> str:
    """Name of a term, such as block.3.head.1."""
    return f"block.{term.block}" if term.index is None else f"block.{term.block}.{term.kind}.{term.index}"


def plan_of(
    nested: Nested,
    options: PruneOptions,
    sizes: Sizes,
    parameters: Mapping[TermId, float],
    trial: Trial | None,
    holdout: str,
    size_of: SizeOf,
    repair: SetRepair | None,
    criteria: Sequence[CriterionSet],
) -> Plan:
    """The largest set within the budget, or the one that was asked for, and what was shown about it.

    parameters: of every term. repair: the repair with which `nested` and `trial` were made; None: none. criteria: sets
    that other criteria chose.
    """
    total, chosen, budget = len(nested.order), nested.chosen, options.budget
    reasons: dict[str, str] = {}
    why = "" if chosen else _why_none(nested)
    if chosen is None:
        reasons |= dict.fromkeys(("predicted", "measured", "guarantee", "mean_guarantee", "saves"), why)
    elif trial is None:
        reasons |= dict.fromkeys(("guarantee", "mean_guarantee"), NO_HOLDOUT)
    if repair is None:
        reasons["repair"] = why or NO_REPAIR
    gone = nested.order[: chosen.removed if chosen else 0]
    saves = _saves(gone, size_of)
    if isinstance(saves, str):
        reasons.setdefault("saves", saves)
    held = sum(parameters[term] for term in gone)
    return Plan(
        granularity=nested.name,
        budget=budget,
        remove=options.remove,
        removed=len(gone),
        of=total,
        share=len(gone) / total,
        parameters=round(held),
        parameters_share=held / sizes.whole[options.of_all],
        parameters_of="all" if options.of_all else "blocks",
        predicted=chosen.predicted if chosen else None,
        measured=chosen.measured if chosen else None,
        uniform=nested.uniform,
        rounds=nested.rounds,
        saves=None if isinstance(saves, str) else saves,
        curve=[
            CurvePoint(removed=p.removed, share=p.removed / total, predicted=p.predicted, measured=p.measured)
            for p in nested.curve
        ],
        held_out=[] if trial is None else _held_out(trial, total),
        criteria=list(criteria),
        guarantee=None if trial is None else _guarantee(nested, trial, holdout, size_of),
        mean_guarantee=None if trial is None else _mean_guarantee(nested, trial, holdout),
        repair=repair,
        set=[name_of(term) for term in gone],
        reasons=reasons,
    )


def _why_none(nested: Nested) -> str:
    """The reason why there is no set."""
    total = len(nested.order)
    if nested.name == "block" and total == 1:
        return ONE_BLOCK
    if nested.uniform and not nested.ends:
        return NONE_UNIFORM
    least = min(nested.curve, key=lambda point: point.removed, default=None)
    if least is None or least.measured is None:
        return NOTHING_FITS
    return f"{NOTHING_FITS}: {least.removed} of {total}, with a damage of {least.measured:.3g}"


def short_of_wanted(plans: Sequence[Plan]) -> list[str]:
    """Warnings for sets that hold clearly less than was asked for, because terms that may go together hold no more."""
    return [
        f"--remove {plan.remove:.1%}: the set of {plan.granularity} terms holds {plan.parameters_share:.1%} of the "
        f"parameters of {'the model' if plan.parameters_of == 'all' else 'all blocks'}, as much as may go together"
        for plan in plans
        if plan.remove is not None and plan.parameters_share < 0.95 * plan.remove
    ]


def worse_in_rounds(plans: Sequence[Plan]) -> list[str]:
    """Warnings for sets that several rounds made worse: one round removes as many parameters with less damage."""
    return [
        f"--rounds: the set of {names_of(plan.granularity)} does more damage ({last.measured:.3g}) than that of one "
        f"round which holds as much ({last.single_measured:.3g}); without --rounds that one is chosen"
        for plan in plans
        for last in plan.rounds[-1:]
        if last.removed == plan.removed and last.measured > last.single_measured
    ]


def _held_out(trial: Trial, total: int) -> list[HeldOut]:
    """The sets that were run, each with the prompts that it was run on. total: how many terms the order has."""
    return [
        HeldOut(
            removed=size,
            share=size / total,
            prompts=len(damages),
            mean=statistics.fmean(damages),
            percentile_90=float(torch.tensor(damages, dtype=torch.float64).quantile(0.9)),
            exceeded=trial.exceeded[number],
            share_exceeded=trial.exceeded[number] / len(damages),
            limit=trial.limit(number),
        )
        for number, (size, damages) in enumerate(zip(trial.sizes, trial.damages, strict=True))
        if damages
    ]


def _guarantee(nested: Nested, trial: Trial, holdout: str, size_of: SizeOf) -> Guarantee:
    """The guarantee for the last set that passed; the share of prompts that it is about was fixed in advance."""
    number = trial.choice()
    removed = 0 if number is None else trial.sizes[number]
    gone = nested.order[:removed]
    saves = _saves(gone, size_of)
    return Guarantee(
        budget=trial.options.budget,
        confidence=trial.options.confidence,
        share_above_limit=trial.options.exceed,
        exceeded=0 if number is None else trial.exceeded[number],
        may_exceed=trial.may_exceed,
        holdout_prompts=trial.prompts,
        holdout_sha256=holdout,
        method=METHOD,
        tested=trial.sizes,
        removed=removed,
        share=removed / len(nested.order),
        saves=None if isinstance(saves, str) else saves,
        set=[name_of(term) for term in gone],
        reasons={"saves": saves} if isinstance(saves, str) else {},
    )


def _saves(gone: Sequence[TermId], size_of: SizeOf) -> SetSize | str:
    """Size of what a checkpoint without the set no longer holds, or the reason why it is not known."""
    return or_reason(lambda: size_of(gone)) if gone else "the set is empty"


def _mean_guarantee(nested: Nested, trial: Trial, holdout: str) -> MeanGuarantee:
    """The guarantee for the mean damage of the largest set that passed."""
    number = trial.mean_choice()
    removed = 0 if number is None else trial.sizes[number]
    return MeanGuarantee.explained(
        "the set is empty",
        budget=trial.options.budget,
        confidence=trial.options.confidence,
        most=trial.most,
        counted_for_less=0 if number is None else trial.capped(number),
        mean=None if number is None else statistics.fmean(trial.damages[number]),
        holdout_prompts=trial.prompts,
        holdout_sha256=holdout,
        method=MEAN_METHOD,
        tested=trial.sizes,
        removed=removed,
        share=removed / len(nested.order),
    )
