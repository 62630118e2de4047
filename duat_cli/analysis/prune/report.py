"""Turns computed readings into the report of `duat prune-bound`; every null gets its reason here."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.sets.plan import name_of
from duat_cli.analysis.prune.terms.certified import Bound
from duat_cli.analysis.prune.terms.criteria import Scores
from duat_cli.analysis.prune.terms.damage import Interval, rounding_of
from duat_cli.analysis.prune.wanted import NOT_ABLATED, Sample
from duat_cli.analysis.prune.work import Work
from duat_cli.grouping import by_key
from duat_cli.kinds import Kind
from duat_cli.models.terms.sites import Site, TermId
from duat_cli.results.prune.terms import (
    NEGLIGIBLE,
    Estimated,
    HeadSummary,
    NeuronSummary,
    Prediction,
    PruneBlock,
    PruneTerm,
)
from duat_cli.statistics.ranking import Estimate, bootstrap, kendall, median_ratio, spearman, worst_ratio
from duat_cli.statistics.survey import mean_of
from duat_cli.text import plural

FEWEST = 5  # fewest terms to rank: three are in order by chance once in six, and their interval is then [1, 1]
DRAWN = 8  # fewest sampled terms to rank: of four, resampled, one interval in seven is [1, 1]
_STATISTICS = {  # field of the report -> statistic of predicted and measured damages, and whether it is of ratios
    "spearman": (spearman, False),
    "kendall": (kendall, False),
    "median_ratio": (median_ratio, True),
}
FACTOR = 2.0  # a prediction is valid if it is off by no more than this factor
NO_DAMAGE = "nothing that was ablated has a damage, predicted or measured"
NONE_ABLATED = "no term of this kind was ablated alone"
NOT_BOUNDED = "certified bounds are left out by --effort quick"
NOT_CARRIED = "carried for the terms that are ablated for real; a larger --measure takes more"


def terms_of(work: Work, damage: Interval, measured: Mapping[TermId, float]) -> list[PruneTerm]:
    """One entry per term, in the order of `work.terms`. damage: predicted, of all terms; measured: of ablated ones."""
    structure, readings, bounds = work.structure, work.readings, _bounds_of(work)
    names = {module: name for name, module in structure.stack.named_modules()}

    @functools.cache
    def met(block: nn.Module, site: Site | None) -> str | None:
        """Name of the place where terms meet the stream; None if it is not known. site: None for the block itself."""
        if site is None:
            return f"output of {names[block]}"
        branch = work.branches[block].at(site)
        return None if isinstance(branch, str) else branch.name(names, block)

    estimate, low, high = (x.tolist() for x in damage)
    found = []
    for place, term in enumerate(work.terms.ids):
        block = structure.calls[term.block]
        site = None if term.index is None else work.sites[block].find(term)[0]
        bound = bounds[term]
        local, frozen, stream = (
            _mean([getattr(r, name).get(term) for r in readings]) for name in ("local", "frozen", "stream")
        )
        reasons = {}
        if local is None:
            reasons["local"] = next((r.reasons[term] for r in readings if term in r.reasons), "undefined")
            reasons["certified_relative"] = reasons["local"]
        place_met = met(block, site)
        if place_met is None:
            reasons["place"] = reasons.get("local", "undefined")
        if frozen is None:
            reasons["frozen"] = reasons.get("local", NOT_CARRIED)
        if bound.value is None:
            reasons["certified"] = reasons["certified_relative"] = bound.reason or "no bound is proved"
        if term not in measured:
            reasons["measured"] = NOT_ABLATED
        found.append(
            PruneTerm(
                kind=term.kind,
                block=term.block,
                index=term.index,
                module=names[block if site is None else site.module],
                place=place_met,
                local=local,
                frozen=frozen,
                linearised=estimate[place],
                linearised_low=low[place],
                linearised_high=high[place],
                certified=bound.value,
                certified_relative=bound.value / stream if bound.value is not None and stream else None,
                certified_vacuous=bound.vacuous,
                measured=measured.get(term),
                reasons=reasons,
            )
        )
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _bounds_of(work: Work) -> dict[TermId, Bound]:
    """The certified bound of every term."""
    if not work.options.spent.certified:
        return dict.fromkeys(work.terms.ids, Bound(None, vacuous=False, reason=NOT_BOUNDED))
    found: dict[TermId, Bound] = {}
    for number, bounds in enumerate(work.certified.bounds):
        sites = work.sites[work.structure.calls[number]]
        for kind in work.kinds:
            for index, bound in enumerate(bounds.of(sites, kind)):
                found[TermId(kind, number, None if kind == "block" else index)] = bound
    return found


def blocks_of(work: Work, terms: Sequence[PruneTerm]) -> list[PruneBlock]:
    """One row a block."""
    session, options = work.session, work.options
    by_place = by_key(((term.block, term.kind), term) for term in terms)
    found = []
    for number in range(len(session.structure.calls)):
        there: dict[str, list[PruneTerm]] = {kind: by_place.get((number, kind), []) for kind in get_args(Kind)}
        sites = work.sites[session.structure.calls[number]].of("attention")
        crossing = {site.offset for site in sites if session.structure.block(number).parts.in_cross(site.module)}
        there["cross"] = [term for term in there["attention"] if term.index in crossing]
        there["attention"] = [term for term in there["attention"] if term.index not in crossing]
        reasons = {
            field: f"the block has no {name}" if kind in options.kinds else f"--granularity leaves {kind} out"
            for part, (field, kind, name) in _FIELDS.items()
            if not there[part]
        }
        parts: dict[str, object] = {}  # fields of the block, of its attentions and of its FFN
        for part in _PARTS:
            parts[part] = _largest([t.linearised for t in there[part]])
            parts[f"{part}_measured"] = measured = _largest([t.measured for t in there[part]])
            if measured is None:
                reasons[f"{part}_measured"] = NOT_ABLATED if there[part] else reasons[part]
        for part in ("attention", "ffn"):
            parts |= _bounds(part, there[part], reasons)
        found.append(
            PruneBlock(
                index=number,
                name=session.structure.block(number).parts.name,
                heads=_heads(there["head"], work.parameters[session.structure.calls[number]].group),
                neurons=_neurons(there["neuron"], options.budget),
                **parts,  # type: ignore[arg-type]
                reasons=reasons,
            )
        )
    return found


def _bounds(name: str, there: list[PruneTerm], reasons: dict[str, str]) -> dict[str, object]:
    """Place and certified bound of the block's attention or FFN, by the report's field names. The reason of each null
    goes into `reasons`."""
    largest = _largest([t.certified for t in there])
    worst = next((t for t in there if t.certified == largest), None)
    found: dict[str, tuple[object, str]] = {  # the value, and the field of the term whose reason explains a null
        f"{name}_place": (worst and worst.place, "place"),
        f"certified_{name}": (largest, "certified"),
        f"certified_{name}_relative": (worst and worst.certified_relative, "certified"),
    }
    for field, (value, key) in found.items():
        if value is None:
            why = next((t.reasons[k] for t in there for k in (key, "certified_relative") if k in t.reasons), None)
            reasons[field] = why or reasons.get(name, "no bound is proved")
    return {field: value for field, (value, _) in found.items()}


_PARTS = ("block", "attention", "cross", "ffn")
_FIELDS: dict[str, tuple[str, Kind, str]] = {  # part of a block -> field, kind of its terms, name
    "block": ("block", "block", "block"),
    "attention": ("attention", "attention", "softmax attention"),
    "cross": ("cross", "attention", "cross-attention"),
    "ffn": ("ffn", "ffn", "FFN that could be told apart"),
    "head": ("heads", "head", "heads that could be told apart"),
    "neuron": ("neurons", "neuron", "neurons that could be told apart"),
}


def _largest(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known and len(known) == len(values) else None


def _heads(heads: list[PruneTerm], group: int) -> HeadSummary | None:
    if not heads:
        return None
    ordered = sorted(heads, key=lambda t: t.linearised or 0.0)
    return HeadSummary(
        count=len(heads),
        kv_heads=len(heads) // group,
        least=ordered[0].linearised,
        least_index=ordered[0].index,
        largest=ordered[-1].linearised,
        largest_index=ordered[-1].index,
    )


def _neurons(neurons: list[PruneTerm], budget: float) -> NeuronSummary | None:
    if not neurons:
        return None
    damage = [t.linearised for t in neurons if t.linearised is not None]
    real = [t.measured for t in neurons if t.measured is not None]
    each = real if len(real) == len(neurons) else damage
    reasons = {
        name: next((t.reasons[field] for t in neurons if field in t.reasons), "no bound is proved")
        for name, field in (("certified_largest", "certified"), ("certified_largest_relative", "certified_relative"))
    }
    return NeuronSummary.explained(
        "no bound is proved",
        reasons,
        count=len(neurons),
        median=statistics.median(damage),
        largest=max(damage),
        negligible_share=sum(abs(d) < NEGLIGIBLE * budget for d in each) / len(each),
        certified_largest=_largest([t.certified for t in neurons]),
        certified_largest_relative=_largest([t.certified_relative for t in neurons]),
    )


# -- prediction ----------------------------------------------------------------------------------------------


def predictions_of(work: Work, damage: Tensor, measured: Mapping[TermId, float]) -> list[Prediction]:
    """How the prediction of each kind, and each criterion, compares with ablations. damage: predicted, of all terms."""
    scores = work.scores()
    return [_prediction(work, kind, sample, damage, measured, scores) for kind, sample in work.sample.items()]


def _prediction(
    work: Work, kind: Kind, sample: Sample, damage: Tensor, measured: Mapping[TermId, float], scores: Scores
) -> Prediction:
    terms, confidence = work.terms, work.options.confidence
    here, truth = terms.places(kind), torch.tensor([measured[terms.ids[k]] for k in sample.places], dtype=torch.float64)
    picked = torch.tensor(sample.places, dtype=torch.long)
    every, chance = damage[here.start : here.stop], torch.tensor(sample.chance, dtype=torch.float64)
    weights = 1 / chance
    fewest = FEWEST if len(truth) == len(every) else DRAWN
    enough = len(truth) >= fewest
    guess = damage[picked]
    least = rounding_of(work.metric.name, work.session.loaded.model.dtype)
    worst, within, reasons = how_far_off(guess, truth, [name_of(terms.ids[k]) for k in sample.places], least)
    if not enough:
        reasons |= dict.fromkeys(_STATISTICS, f"{len(truth)} ablated terms are too few to be ranked")
    values: dict[str, Estimated | None] = dict.fromkeys(_STATISTICS)
    criteria: dict[str, Estimated | None] = {}
    if enough:
        both = (guess > 0) & (truth > 0)  # a ratio needs both; a loss may fall
        for name, (statistic, divides) in _STATISTICS.items():
            which = both if divides else torch.ones_like(both)
            x, y, w = guess[which], truth[which], weights[which]
            ranked = bootstrap(statistic, x, y, confidence, weights=w) if len(x) >= fewest else None
            values[name] = _estimated(ranked)
            if values[name] is None:
                reasons[name] = "one side is constant" if len(x) >= fewest else "too few damages above zero"
        for name, score in scores.items():
            if bool(torch.isfinite(score[picked]).all()):
                criteria[name] = _estimated(bootstrap(spearman, score[picked], truth, confidence, weights=weights))
    mean = mean_of(every, picked - here.start, chance, truth, confidence)
    if mean is None:
        reasons["mean_measured"] = f"{len(truth)} ablated terms say too little of all {len(every)}"
    return Prediction(
        granularity=kind,
        metric=work.metric.name,
        n=len(truth),
        of=len(every),
        mean_predicted=float(every.double().mean()),
        mean_measured=_estimated(mean),
        criteria=criteria,
        reasons=reasons,
        worst_ratio=worst,
        valid_to=within,
        **values,
    )


def how_far_off(
    guess: Tensor, truth: Tensor, names: Sequence[str], least: float = 0.0
) -> tuple[float | None, float | None, dict[str, str]]:
    """The worst factor between predicted and measured damages, (terms,) each; the prediction up to which all are within
    FACTOR; and the reasons of those that are None. Terms with both damages negative are left out.

    least: size of rounding errors. Damages of a term that are both no larger count as 0: a term that does nothing may
    be measured so, as one of the rows of a pass.
    """
    noise = (guess.abs() <= least) & (truth.abs() <= least)
    guess, truth = guess.masked_fill(noise, 0.0), truth.masked_fill(noise, 0.0)
    rated = _rated(guess, truth)
    guess, truth, names = guess[rated], truth[rated], [name for name, on in zip(names, rated, strict=True) if on]
    ratio, reasons = _ratios(guess, truth), dict[str, str]()
    finite = (ratio > 0) & ratio.isfinite()
    there, apart = finite & (guess != 0), ~finite
    worst = float(worst_ratio(guess[there], truth[there])) if bool(there.any()) else None
    if bool(apart.any()):
        far = int(((guess - truth).abs() * apart).argmax())
        others = "" if worst is None else f"; of the others the worst factor is {worst:.3g}"
        count = f"{int(apart.sum())} of {plural(len(guess), 'ablated term')}"
        reasons["worst_ratio"] = f"no finite factor for {count}: {_said(names, guess, truth, far)}{others}"
        worst = None
    elif worst is None:
        reasons["worst_ratio"] = NO_DAMAGE if len(guess) else NONE_ABLATED
    within = valid_to(guess, truth)
    if within is None:
        off = guess.abs().where(_off(ratio), math.inf)
        reasons["valid_to"] = reasons.get("worst_ratio", NO_DAMAGE)
        if bool(off.isfinite().any()):
            said = _said(names, guess, truth, int(off.argmin()))
            reasons["valid_to"] = f"off by more is already one of the smallest: {said}"
    return worst, within, reasons


def _said(names: Sequence[str], guess: Tensor, truth: Tensor, place: int) -> str:
    return f"{names[place]} is predicted to do {float(guess[place]):.3g} and did {float(truth[place]):.3g}"


def valid_to(guess: Tensor, truth: Tensor) -> float | None:
    """The largest prediction above zero such that neither it nor a smaller one is off by more than FACTOR; None where
    there is none. Predictions with the wrong sign are ordered by absolute value."""
    rated = _rated(guess, truth)
    guess, truth = guess[rated], truth[rated]
    off = guess[_off(_ratios(guess, truth))].abs()
    good = guess[guess < off.min()] if len(off) else guess  # "<": one bad prediction rules out all equal ones
    return float(good.max()) if bool((good > 0).any()) else None


def _rated(guess: Tensor, truth: Tensor) -> Tensor:
    """Which terms are rated by a factor: those without harm, predicted and measured damage below 0 (nll), are not."""
    return (guess >= 0) | (truth >= 0)


def _ratios(guess: Tensor, truth: Tensor) -> Tensor:
    """Predicted / measured; 1 where both are 0."""
    return torch.where(guess == truth, 1.0, guess / truth)


def _off(ratio: Tensor) -> Tensor:
    return (ratio > FACTOR) | (ratio < 1 / FACTOR)


def _estimated(estimate: Estimate | None) -> Estimated | None:
    return None if estimate is None else Estimated(value=estimate.value, low=estimate.low, high=estimate.high)
