"""`duat prune-bound`: what can go, how far the output moves, and with what guarantee."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from duat_cli import __version__
from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.prune.ablation import Ablator, Tick, mean_values
from duat_cli.analysis.prune.apply import Applied, apply_terms
from duat_cli.analysis.prune.certified import Bound, certified_bounds
from duat_cli.analysis.prune.criteria import Activations, Scores, block_scores, taylor, weight_scores
from duat_cli.analysis.prune.damage import Loss, Metric, MetricName, metric_for
from duat_cli.analysis.prune.export import chosen_set, mergekit_slices
from duat_cli.analysis.prune.plans import Nested, guaranteed, nested_sets
from duat_cli.analysis.prune.readings import Reader, Readings
from duat_cli.analysis.prune.report import blocks_of, plan_of, predictions_of, terms_of
from duat_cli.analysis.prune.responses import SEED, TermList, responses
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.errors import InputError
from duat_cli.kinds import KINDS, Kind
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import DISCOVERY_TOKENS, probe_ids, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.passes import Means, Recorded, prove_chained, record
from duat_cli.models.terms.branches import find_branches
from duat_cli.models.terms.sites import BlockSites, TermId, find_sites
from duat_cli.results.base import Skipped
from duat_cli.results.prune import Plan, Protocol, PruneReport
from duat_cli.statistics.binomial import prompts_needed

FOLLOWED = 256  # terms carried frozen to the last block, where a model has more than this many
NAMES: dict[Kind, str] = {
    "neuron": "neurons",
    "head": "heads",
    "expert": "experts",
    "ffn": "FFNs",
    "attention": "attentions",
    "block": "blocks",
}


@dataclass(frozen=True)
class PruneOptions:
    """What `duat prune-bound` computes."""

    kinds: tuple[Kind, ...] = KINDS
    metric: MetricName | None = None
    probes: int = 32
    measure: int = 24
    budget: float = 0.1
    confidence: float = 0.95
    exceed: float = 0.1
    ablate_mean: bool = False


@dataclass(frozen=True)
class PruneOutcome:
    """The report, and what export needs."""

    report: PruneReport
    session: Session
    sites: Mapping[nn.Module, BlockSites]
    nested: dict[Kind, Nested]

    def chosen(self, plan: Plan) -> list[TermId]:
        """The set of a plan: what was guaranteed on held-out prompts, or, without any, the largest in the budget.

        InputError where that is none.
        """
        removed = plan.removed if plan.guarantee is None else plan.guarantee.removed
        if not removed:
            raise InputError(_nothing(plan))
        return self.nested[plan.granularity].order[:removed]

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
    if loaded.nonfinite_weights:
        name, count = next(iter(loaded.nonfinite_weights.items()))
        raise InputError(f"{loaded.name}: {name} holds {count} values that are NaN or infinite; repair the checkpoint")
    held_out, notes = fresh(prompts, held_out)
    check_holdout(len(held_out), options)
    session = Session(loaded, progress, cache=False)
    work = _Work(session, prompts, options, progress)
    for number in range(len(prompts)):
        work.prompt(number)
    damage = work.metric.predicted(torch.stack(work.responses), options.confidence)
    scores = work.scores()
    nested: dict[Kind, Nested] = {}
    plans = []
    for kind in work.kinds:
        tick = _named(progress, f"sets of {NAMES[kind]}")
        nested[kind] = nested_sets(
            work.ablator, work.terms, kind, damage[0], work.responses, prompts, options.budget, tick
        )
        tested, sizes = None, list[int]()
        if held_out and nested[kind].chosen is not None:
            tick = _named(progress, f"sets of {NAMES[kind]} on {len(held_out)} held-out prompts")
            tested, sizes = guaranteed(
                work.ablator, nested[kind], held_out, options.budget, options.exceed, options.confidence, tick
            )
        plans.append(plan_of(nested[kind], options.budget, tested, sizes, _fingerprint(held_out)))
    progress(0, 1, "certified bounds")
    bounds = certified(session, work)
    terms = terms_of(
        session.structure, work.sites, work.terms, damage, work.readings, bounds, work.measured(), work.branches
    )
    report = PruneReport(
        duat_version=__version__,
        environment=session.environment(),
        model=session.model_facts(),
        prompts=prompt_facts(prompts),
        certificate=session.certificate(max(work.errors)),
        protocol=Protocol(
            metric=work.metric.name,
            unit=work.metric.unit,
            meaning=work.metric.meaning,
            ablate="mean" if options.ablate_mean else "zero",
            probes=options.probes,
            confidence=options.confidence,
            tokens=sum(p.input_ids.shape[1] for p in prompts),
            seed=SEED,
        ),
        blocks=blocks_of(session, terms, options.budget),
        prediction=predictions_of(
            work.terms, work.kinds, damage[0], work.measured(), scores, work.metric.name, options.confidence
        ),
        plans=plans,
        terms=terms,
        skipped=[*session.skipped(), *work.skipped],
        warnings=[*loaded.warnings, *notes],
        run=session.run_facts(),
    )
    return PruneOutcome(report, session, work.sites, nested)


def _nothing(plan: Plan) -> str:
    """Why there is no set to write."""
    if plan.granularity == "block" and plan.of == 1:
        return "--export, --apply: the model has one block, and one has to stay"
    budget = f"the budget of {plan.budget:g}"
    if plan.removed:
        why = f"no set of {plan.granularity}s is guaranteed to stay within {budget} on the held-out prompts"
    else:
        why = f"no set of {plan.granularity}s stays within {budget}"
    return f"--export, --apply: {why}; raise --budget"


def _named(progress: Progress, what: str) -> Tick:
    def tick(done: int, total: int) -> None:
        progress(done, total, what)

    return tick


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


def certified(session: Session, work: _Work) -> dict[TermId, Bound]:
    """The certified bound of every term."""
    found: dict[TermId, Bound] = {}
    for number, bounds in enumerate(certified_bounds(session.structure)):
        sites = work.sites[session.structure.calls[number]]
        for kind in work.kinds:
            for index, bound in enumerate(bounds.of(sites, kind)):
                found[TermId(kind, number, None if kind == "block" else index)] = bound
    return found


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256("".join(p.sha256 + "\n" for p in prompts).encode()).hexdigest()


@dataclass
class _Work:
    """What is gathered prompt by prompt."""

    session: Session
    prompts: Sequence[Prompt]
    options: PruneOptions
    progress: Progress
    responses: list[Tensor] = field(default_factory=list)  # a prompt: (probes, terms)
    readings: list[Readings] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.structure = self.session.structure
        stack = self.structure.stack
        prove_chained(self.structure, lambda: run_stack(stack, probe_ids(stack, DISCOVERY_TOKENS))[0])
        self.sites = find_sites(self.structure)
        self.branches = find_branches(self.structure, self.sites)
        self.metric: Metric = metric_for(self.options.metric, self.session.loaded.model, self.structure)
        self.kinds = self._kinds()
        self.terms = TermList.of(self.structure, self.sites, self.kinds)
        self.sample = {kind: self._sample(kind) for kind in self.kinds}
        self._seen = Activations()
        self._damage = {kind: torch.zeros(len(places), dtype=torch.float64) for kind, places in self.sample.items()}
        self._loss = self._loss_metric()
        self._taylor = torch.zeros(len(self.terms.ids), dtype=torch.float64)
        self._scored = 0
        self.ablator = Ablator(self.structure, self.sites, self.metric, self._means())

    def _loss_metric(self) -> Loss | None:
        """What Taylor's criterion is the slope of; None for a model that predicts no next token."""
        try:
            found = metric_for("nll", self.session.loaded.model, self.structure)
        except InputError:
            return None
        return found if isinstance(found, Loss) else None

    def _kinds(self) -> tuple[Kind, ...]:
        kept: list[Kind] = []
        for kind in self.options.kinds:
            if any(self.sites[module].count(kind) for module in self.structure.calls):
                kept.append(kind)
            reasons = {
                self.sites[m].reasons[kind]: k
                for k, m in enumerate(self.structure.calls)
                if kind in self.sites[m].reasons
            }
            if kind != "expert" or kind in kept:  # a dense model has no experts; that needs no mention
                found = sorted(reasons.items(), key=lambda item: item[1])
                self.skipped += [Skipped(what=f"{NAMES[kind]} of block {k}", why=why) for why, k in found]
        if not kept:
            raise InputError(f"--granularity {','.join(self.options.kinds)}: the model has no such terms")
        if self.options.ablate_mean and "expert" in kept:
            raise InputError("--ablate mean: an expert has no mean that could stand in for it; leave out expert")
        return tuple(kept)

    def _sample(self, kind: Kind) -> list[int]:
        """Places of the terms of a kind that are ablated for real: all, or a uniform sample."""
        here = self.terms.places(kind)
        count = here.stop - here.start
        if count <= self.options.measure:
            return list(range(here.start, here.stop))
        generator = torch.Generator().manual_seed(SEED)
        picked = torch.randperm(count, generator=generator)[: self.options.measure]
        return sorted((picked + here.start).tolist())

    def _means(self) -> Means | None:
        if not self.options.ablate_mean:
            return None
        self.progress(0, 1, "mean activations")
        return mean_values(self.structure, self.sites, self.metric, [p.input_ids for p in self.prompts])

    # -- a prompt ----------------------------------------------------------------------------------------------

    def prompt(self, number: int) -> None:
        """Everything that one prompt adds."""
        prompt, total = self.prompts[number], len(self.prompts)
        name = f"prompt {number + 1} of {total}"
        ids = self.ablator.place(prompt)
        recorded = record(self.structure, self.metric.forward(ids), self.sites, self._seen.see)
        steps = 3 + sum(map(len, self.sample.values()))
        done = number * steps
        self.progress(done, total * steps, f"{name}: responses of {len(self.terms.ids)} terms")
        arguments = (self.structure, self.sites, self.metric, ids, recorded, self.terms)
        self.responses.append(responses(*arguments, self.options.probes, number, self.ablator.means))
        self._slope(ids, recorded)
        self.progress(done + 1, total * steps, f"{name}: exact readings")
        self._read(prompt)
        done += 3
        for kind, places in self.sample.items():
            for k, place in enumerate(places):
                self._damage[kind][k] += self.ablator.damage(
                    recorded, ids, self.ablator.removals([self.terms.ids[place]])
                )
                done += 1
                self.progress(done, total * steps, f"{name}: ablating {NAMES[kind]}")

    def _slope(self, ids: Tensor, recorded: Recorded) -> None:
        """The gradient of the loss, for Taylor's criterion."""
        if self._loss is None or ids.shape[1] < 2:
            return
        if self.metric.name == "nll":
            self._taylor += self.responses[-1][0].double().abs()
        else:
            passed = recorded if self.metric.name == "kl" else record(self.structure, self._loss.forward(ids))
            self._taylor += taylor(self.structure, self.sites, self._loss, self.terms, ids, passed)
        self._scored += 1

    def _read(self, prompt: Prompt) -> None:
        reader = Reader(self.sites, self.branches, self.terms.ids, self._followed())
        decomposition = Decomposition()
        last: list[Tensor] = []

        def listen(run: BlockRun) -> None:
            self.errors.append(decomposition.advance(run).terms.error)
            reader(run)
            last[:] = [run.output]

        self.session.sweep(prompt, listen)
        self.readings.append(reader.finish(last[0]))

    def _followed(self) -> set[TermId]:
        """The terms carried to the last block: all but neurons where they are few, and everything that is ablated."""
        sampled = {self.terms.ids[place] for places in self.sample.values() for place in places}
        others = [term for term in self.terms.ids if term.kind != "neuron"]
        return sampled | set(others) if len(others) <= FOLLOWED else sampled

    # -- results -----------------------------------------------------------------------------------------------

    def measured(self) -> dict[TermId, float]:
        """Mean damage of the ablated terms."""
        return {
            self.terms.ids[place]: float(value) / len(self.prompts)
            for kind, places in self.sample.items()
            for place, value in zip(places, self._damage[kind], strict=True)
        }

    def scores(self) -> Scores:
        """Every criterion for every term."""
        found = weight_scores(self.structure, self.sites, self.terms, self._seen)
        if self._scored:
            found["taylor"] = self._taylor / self._scored
        return found | block_scores(self.terms, self.readings)
