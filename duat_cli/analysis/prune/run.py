"""`duat prune-bound`: what can go, how far the output moves, and with what guarantee."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from duat_cli import __version__
from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.prune.report import blocks_of, predictions_of, terms_of
from duat_cli.analysis.prune.sets.apply import Applied, apply_terms
from duat_cli.analysis.prune.sets.export import chosen_set, mergekit_slices
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.plan import plan_of
from duat_cli.analysis.prune.sets.size import set_size
from duat_cli.analysis.prune.terms.certified import Bound
from duat_cli.analysis.prune.terms.responses import SEED
from duat_cli.analysis.prune.work import Work
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.errors import InputError
from duat_cli.kinds import Kind
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import BlockSites, TermId
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import Plan
from duat_cli.results.prune.terms import Protocol
from duat_cli.statistics.binomial import prompts_needed


@dataclass(frozen=True)
class PruneOutcome:
    """The report, and what export needs."""

    report: PruneReport
    session: Session
    sites: Mapping[nn.Module, BlockSites]
    nested: dict[Kind, Nested]

    def chosen(self, plan: Plan, which: str | None = None) -> list[TermId]:
        """The set of a plan: 'guaranteed' on held-out prompts, 'largest' in the budget, or the first of that number.

        None: what is guaranteed, or, without held-out prompts, the largest. InputError where that is none.
        """
        order = self.nested[plan.granularity].order
        most = len(order) - (plan.granularity == "block")
        if which is not None and which.isdecimal():
            if not 1 <= int(which) <= most:
                raise InputError(f"--set {which}: expected 1 to {most}, of {plan.of} {plan.granularity}s")
            return order[: int(which)]
        if which == "guaranteed" and plan.guarantee is None:
            raise InputError(f"--set guaranteed: {plan.reasons['guarantee']}")
        by_test = plan.guarantee is not None and which != "largest"
        removed = plan.guarantee.removed if plan.guarantee is not None and by_test else plan.removed
        if not removed:
            raise InputError(_nothing(plan, by_test))
        return order[:removed]

    def exported(self, terms: Sequence[TermId], suffix: str) -> str:
        """The set as JSON, or, for whole blocks, as mergekit slices (.yaml)."""
        facts, loaded = self.report.model, self.session.loaded
        if suffix != ".json":
            gone = [term.block for term in terms]
            path = loaded.name if loaded.revision else str(loaded.files.path)
            dtype = str(most_stored(loaded.files) or loaded.model.dtype).removeprefix("torch.")
            return mergekit_slices(facts.blocks, gone, model=path, dtype=dtype)
        chosen = chosen_set(
            loaded.model,
            self.session.structure,
            self.sites,
            terms,
            name=facts.name,
            revision=facts.revision,
            fingerprint=facts.fingerprint,
            weights=self.session.weights,
        )
        return chosen.model_dump_json(indent=2) + "\n"

    def applied(self, terms: Sequence[TermId], directory: Path) -> Applied:
        """A checkpoint without the set, read back and compared."""
        loaded = self.session.loaded
        return apply_terms(loaded.model, self.session.structure, self.sites, terms, directory, loaded.files)


def prune_bound(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    options: PruneOptions,
    progress: Progress,
) -> PruneOutcome:
    """The report on `loaded` over `prompts`; sets are tested on `held_out`, if there are any."""
    _require_finite(loaded)
    held_out, notes = fresh(prompts, held_out)
    check_holdout(len(held_out), options)
    session = Session(loaded, progress, cache=False)
    work = Work(session, prompts, options, progress)
    _require_finite(loaded)  # weights that are read block by block have been seen by now
    work.run()
    nested = work.nested
    trials = work.tested(held_out)
    size_of = functools.partial(set_size, loaded, session.structure, work.sites, work.certified.bounds)
    digest = _fingerprint(held_out)
    plans = [plan_of(nested[kind], options.budget, trials.get(kind), digest, size_of) for kind in work.kinds]
    damage, scores, bounds = work.damage, work.scores(), certified(work)
    terms = terms_of(
        session.structure, work.sites, work.terms, damage, work.readings, bounds, work.measured(), work.branches
    )
    report = PruneReport(
        duat_version=__version__,
        environment=session.environment(),
        model=session.model_facts(),
        prompts=prompt_facts(prompts),
        certificate=session.certificate(max(work.errors)),
        protocol=_protocol(work),
        blocks=blocks_of(session, terms, options.budget),
        prediction=predictions_of(
            work.terms, work.kinds, damage[0], work.measured(), scores, work.metric.name, options.confidence
        ),
        plans=plans,
        terms=terms,
        skipped=[*session.skipped(), *work.skipped],
        warnings=[*session.warnings(), *notes],
        run=session.run_facts(),
    )
    return PruneOutcome(report, session, work.sites, nested)


def _protocol(work: Work) -> Protocol:
    options, losses = work.options, work.losses
    why = "the metric looks at no logits" if work.metric.name == "hidden" else "no prompt has a next token to predict"
    return Protocol(
        metric=work.metric.name,
        unit=work.metric.unit,
        meaning=work.metric.meaning,
        ablate="mean" if options.ablate_mean else "zero",
        probes=options.probes,
        confidence=options.confidence,
        tokens=sum(p.input_ids.shape[1] for p in work.prompts),
        seed=SEED,
        loss=sum(loss for loss, _ in losses) / len(losses) if losses else None,
        uniform_loss=math.log(losses[0][1]) if losses else None,
        reasons={} if losses else dict.fromkeys(("loss", "uniform_loss"), why),
    )


def _nothing(plan: Plan, by_test: bool) -> str:
    """Why there is no set to write."""
    if plan.granularity == "block" and plan.of == 1:
        return "--export, --apply: the model has one block, and one has to stay"
    budget = f"the budget of {plan.budget:g}"
    if plan.removed and by_test:
        why = f"no set of {plan.granularity}s is guaranteed to stay within {budget} on the held-out prompts"
    else:
        why = f"no set of {plan.granularity}s stays within {budget}"
    return f"--export, --apply: {why}; raise --budget, or name a number of terms with --set"


def _require_finite(loaded: LoadedModel) -> None:
    if loaded.nonfinite_weights:
        name, count = next(iter(loaded.nonfinite_weights.items()))
        raise InputError(f"{loaded.name}: {name} holds {count} values that are NaN or infinite; repair the checkpoint")


def fresh(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> tuple[list[Prompt], list[str]]:
    """The held-out prompts that played no part in choosing, each once, and a note on the others.

    Compared as token ids: texts that differ only behind --max-tokens are the same prompt.
    """
    seen = {tuple(p.input_ids.flatten().tolist()) for p in prompts}
    kept = []
    for prompt in held_out:
        ids = tuple(prompt.input_ids.flatten().tolist())
        if ids not in seen:
            kept.append(prompt)
            seen.add(ids)
    dropped = len(held_out) - len(kept)
    if not dropped:
        return kept, []
    what = f"{dropped} of {len(held_out)} held-out prompts are left out: the same tokens chose the sets, or came before"
    if not kept:
        raise InputError(f"--holdout: {what}; nothing is left to hold out, give other prompts")
    return kept, [what]


def check_holdout(prompts: int, options: PruneOptions) -> None:
    """Too few held-out prompts are said before anything is computed."""
    needed = prompts_needed(options.exceed, options.confidence)
    if 0 < prompts < needed:
        raise InputError(
            f"--holdout: {prompts} prompts cannot show with {100 * options.confidence:g} % confidence that at most "
            f"{100 * options.exceed:g} % exceed the budget; at least {needed} are needed, or a larger --exceed"
        )


def certified(work: Work) -> dict[TermId, Bound]:
    """The certified bound of every term."""
    found: dict[TermId, Bound] = {}
    for number, bounds in enumerate(work.certified.bounds):
        sites = work.sites[work.structure.calls[number]]
        for kind in work.kinds:
            for index, bound in enumerate(bounds.of(sites, kind)):
                found[TermId(kind, number, None if kind == "block" else index)] = bound
    return found


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256("".join(p.sha256 + "\n" for p in prompts).encode()).hexdigest()
