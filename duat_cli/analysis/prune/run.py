"""`duat prune-bound`: the terms that can be removed, how far that moves the output, and with what guarantee."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from duat_cli import __version__
from duat_cli.analysis.plan.task import PruneOptions, longest
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.prune.pooled import pooled_cosines
from duat_cli.analysis.prune.repair.choice import Repairs, repair_sets
from duat_cli.analysis.prune.repair.repairer import Repairer
from duat_cli.analysis.prune.repair.standing import biases
from duat_cli.analysis.prune.report import blocks_of, predictions_of, terms_of
from duat_cli.analysis.prune.sets.apply import apply_terms
from duat_cli.analysis.prune.sets.card import ROUNDED_MEANS, write_card
from duat_cli.analysis.prune.sets.export import chosen_set, kinds_of_blocks, mergekit_slices
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.plan import NONE_UNIFORM, plan_of, short_of_wanted, worse_in_rounds
from duat_cli.analysis.prune.sets.size import set_size
from duat_cli.analysis.prune.sets.worth import NO_TOKENS, worth
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.analysis.prune.terms.responses import SEED
from duat_cli.analysis.prune.wanted import numbered, require_set
from duat_cli.analysis.prune.work import Work
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.compat.libc import give_back_free_memory
from duat_cli.errors import InputError
from duat_cli.kinds import names_of
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.inputs.within import pieces_of
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.edits.surgery import exchanged
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prompts import set_of
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import Plan
from duat_cli.results.prune.terms import Protocol
from duat_cli.results.prune.written import Written
from duat_cli.statistics.binomial import prompts_needed

BESIDE = (
    "reads a picture beside its text, not within it, which prune-bound does not follow; duat inspect and verify do, "
    "and --stack vision takes the pictures alone"
)
STREAMED = (
    "--repair: the refitted layers of a set stand beside weights that are all in memory, and these are read block by "
    "block; run it where the model fits"
)


@dataclass(frozen=True)
class PruneOutcome:
    """The report, and everything that export needs."""

    report: PruneReport
    session: Session
    nested: dict[str, Nested]
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    repairer: Repairer | None
    ablator: Ablator
    parameters: Mapping[nn.Module, BlockParameters]
    """Parameters of every block."""
    no_loss: str | None
    """Why the prompts have no next-token loss; None where they have one."""

    def chosen(self, plan: Plan, which: str | None = None) -> list[TermId]:
        """The set of a plan: 'guaranteed' on held-out prompts, 'largest' in the budget, or the first so many terms.

        None: the guaranteed set; but the largest without held-out prompts or where a share of the parameters was asked
        for. Raises InputError where there is no such set.
        """
        order = self.nested[plan.granularity].order
        if which is not None and which.isdecimal():
            require_set(int(which), len(order), plan.granularity)
            return order[: int(which)]
        if which == "guaranteed" and plan.guarantee is None:
            raise InputError(f"--set guaranteed: {plan.reasons['guarantee']}")
        by_test = plan.guarantee is not None and which != "largest" and (plan.remove is None or which is not None)
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
            kinds = kinds_of_blocks(loaded.headed, self.session.structure, gone)
            return mergekit_slices(facts.blocks, gone, model=path, dtype=dtype, kinds=kinds)
        structure, weights = self.session.structure, self.session.weights
        chosen = chosen_set(loaded.named, structure, self.ablator.sites, terms, facts, weights)
        return chosen.model_dump_json(indent=2) + "\n"

    def applied(self, terms: Sequence[TermId], directory: Path) -> Written:
        """Writes a checkpoint without the set, reads it back, compares it, and measures it beside the model. The means
        of removed terms, with --ablate mean, go into biases; raises UnsupportedModelError where there are none."""
        loaded, repaired = self.session.loaded, None if self.repairer is None else self.repairer.repaired(terms)
        changed: AbstractContextManager[None] = repaired.in_place() if repaired else nullcontext()
        stored = stored_dtype(loaded)
        if self.ablator.means is not None:
            changed = exchanged(biases(loaded.headed, self.ablator, terms, stored))
        with changed:
            structure, sites = self.session.structure, self.ablator.sites
            done = apply_terms(loaded, structure, sites, self.parameters, terms, directory)
        if self.ablator.means is not None and torch.finfo(stored).eps > torch.finfo(loaded.model.dtype).eps:
            done = replace(done, notes=(*done.notes, ROUNDED_MEANS))
        written = worth(
            loaded,
            done,
            directory,
            self.held_out,
            self.prompts,
            metric=self.ablator.metric,
            budget=self.report.plans[0].budget,
            kind=self.report.plans[0].granularity,
            terms=len(terms),
            repaired=repaired is not None and not repaired.dropped,
            no_loss=self.no_loss,
        )
        write_card(directory, loaded.files.path, self.report, written)
        return written


@dataclass(frozen=True)
class Begun:
    """A model whose terms are known, and the checked prompts."""

    work: Work
    held_out: list[Prompt]
    calibration: Sequence[Prompt]
    notes: list[str]

    @property
    def session(self) -> Session:
        return self.work.session

    def repairer(self) -> Repairer | None:
        """The repairer, which runs the calibration prompts; None where no repair was asked for."""
        work, loaded = self.work, self.session.loaded
        if not work.options.repair:
            return None
        dtype = stored_dtype(loaded)
        return Repairer(loaded.headed, work.ablator, work.prompts, self.calibration, dtype, work.processes)


def prune_bound(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    options: PruneOptions,
    progress: Progress,
    calibration: Sequence[Prompt] = (),
) -> PruneOutcome:
    """The report on `loaded` over `prompts`; sets are tested on `held_out`, if there are any.

    calibration: prompts that a repair is fitted to; empty: `prompts`, uncut.
    """
    begun = begin(loaded, prompts, held_out, options, progress, calibration)
    begun.work.run()
    return conclude(begun)


def begin(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    options: PruneOptions,
    progress: Progress,
    calibration: Sequence[Prompt] = (),
    *,
    in_parts: bool = False,
) -> Begun:
    """Checks and prepares everything before the prompts run. in_parts: as for `Work`."""
    _require_finite(loaded)
    if loaded.pair is None and "input_ids" in (loaded.like or {}) and not pieces_of(loaded.model.config):
        raise InputError(f"{type(loaded.model).__name__} {BESIDE}")
    if options.repair and loaded.paged is not None:
        raise InputError(STREAMED)
    options = replace(options, whole=options.whole or loaded.like is not None)  # a picture is cut nowhere
    held_out, notes = fresh([*prompts, *calibration], held_out)
    options.require_held_out(len(held_out))
    calibration = calibration or prompts
    prompts, cut = shortened(prompts, options)
    held_out, fewer = few(held_out, options)
    processes = Processes(loaded.processes, progress, loaded.model)
    session = Session(loaded, processes, cache=False)
    work = Work(session, prompts, options, processes, in_parts=in_parts, tried=bool(held_out))
    if loaded.paged is not None:
        loaded.paged.pager.complete()  # mostly rows of the embedding that no prompt needs; now, not beside the report
    _require_finite(loaded)  # by now all weights that are read block by block have been seen
    return Begun(work, held_out, calibration, [*notes, *cut, *fewer])


def conclude(begun: Begun) -> PruneOutcome:
    """Tests the chosen sets and makes the report."""
    work, held_out = begun.work, begun.held_out
    session, options, prompts = work.session, work.options, work.prompts
    repairer = begun.repairer()
    if repairer is None:
        repairs = Repairs(work.nested, work.tested(held_out))
    else:
        repairs = repair_sets(repairer, work.nested, held_out, options)
    nested = repairs.nested
    size_of = functools.partial(set_size, session.loaded, session.structure, work.sites, work.parameters)
    digest = set_of(prompt_facts(held_out)).sha256
    held = dict(zip(work.terms.ids, work.sizes.parameters.tolist(), strict=True))
    plans = [
        plan_of(
            one, options, work.sizes, held, repairs.trials.get(name), digest, size_of, repairs.reports.get(name),
            work.rivals[name].rows(options.confidence) if name in work.rivals else (),
        )
        for name, one in nested.items()
    ]  # fmt: skip
    eq16 = work.printing.rows(nested, work.moved)
    pooled, unpooled = pooled_cosines(work, plans, nested, held_out)
    give_back_free_memory()  # what the passes freed, before the report's many small terms are made
    damage, measured = work.damage, work.measured()
    terms = terms_of(work, damage, measured)
    report = PruneReport(
        duat_version=__version__,
        environment=session.environment(),
        model=session.model_facts(),
        prompts=prompt_facts(prompts),
        certificate=session.certificate(max([*work.errors, *(row.error for row in eq16)])),
        protocol=_protocol(work),
        blocks=blocks_of(work, terms),
        prediction=predictions_of(work, damage[0], measured),
        plans=plans,
        pooled=pooled,
        eq16=eq16,
        terms=terms,
        streamed=session.loaded.paged is not None,
        written=None,
        skipped=[*session.skipped(), *work.skipped, *work.printing.skipped, *repairs.skipped, *unpooled],
        warnings=[
            *session.warnings(),
            *begun.notes,
            *numbered(session.structure, work.sites),
            *repairs.warnings,
            *short_of_wanted(plans),
            *worse_in_rounds(plans),
        ],
        run=session.run_facts(work.processes.memory),
    )
    return PruneOutcome(
        report, session, nested, prompts, held_out, repairer, work.ablator, work.parameters, work.no_loss
    )


def stored_dtype(loaded: LoadedModel) -> torch.dtype:
    """Dtype of most stored weights. Changed weights are rounded to it, so that a file holds what was measured."""
    return most_stored(loaded.files) or loaded.model.dtype


def _protocol(work: Work) -> Protocol:
    options, losses = work.options, work.losses
    if work.classes is not None:
        why = "the model predicts classes, and the true ones are not known"
    elif work.metric.name == "hidden":
        why = "the metric looks at no logits"
    else:
        why = work.no_loss or NO_TOKENS
    return Protocol.explained(
        why,
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
    )


def _nothing(plan: Plan, by_test: bool) -> str:
    """Why there is no set to write."""
    if plan.granularity == "block" and plan.of == 1:
        return "--export, --apply: the model has one block, and one has to stay"
    if plan.reasons.get("predicted") == NONE_UNIFORM:
        return f"--export, --apply: {NONE_UNIFORM}; leave out --uniform"
    budget = f"the budget of {plan.budget:g}"
    if plan.removed and by_test:
        why = f"no set of {names_of(plan.granularity)} is guaranteed to stay within {budget} on the held-out prompts"
    else:
        why = f"no set of {names_of(plan.granularity)} stays within {budget}"
    return f"--export, --apply: {why}; raise --budget, or name a number of terms with --set"


def _require_finite(loaded: LoadedModel) -> None:
    if loaded.nonfinite_weights:
        name, count = next(iter(loaded.nonfinite_weights.items()))
        raise InputError(f"{loaded.name}: {name} holds {count} values that are NaN or infinite; repair the checkpoint")


def fresh(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> tuple[list[Prompt], list[str]]:
    """The held-out prompts that played no part in choosing sets, each once, and a note on the others.

    Prompts are compared as the model reads them: texts that differ only behind --max-tokens are the same prompt.
    """
    seen = {p.read for p in prompts}
    kept = []
    for prompt in held_out:
        if prompt.read not in seen:
            kept.append(prompt)
            seen.add(prompt.read)
    dropped = len(held_out) - len(kept)
    if not dropped:
        return kept, []
    same = "tokens" if held_out[0].prepared is None else "numbers"
    what = f"{dropped} of {len(held_out)} held-out prompts are left out: the same {same} chose the sets, or came before"
    if not kept:
        raise InputError(f"--holdout: {what}; nothing is left to hold out, give other prompts")
    return kept, [what]


def shortened(prompts: Sequence[Prompt], options: PruneOptions) -> tuple[list[Prompt], list[str]]:
    """The prompts, cut to the length at which sets are chosen, and a note where any was cut."""
    lengths = [p.input_ids.shape[1] for p in prompts]
    most = longest(lengths, options.spent)
    if most is None:
        return list(prompts), []
    long = sum(n > most for n in lengths)
    cut = [replace(p, input_ids=p.input_ids[:, :most], spans=p.spans and p.spans[:most]) for p in prompts]
    note = f"--effort {options.effort}: {long} of {len(prompts)} prompts are cut to {most} tokens where sets are chosen"
    return cut, [f"{note}; held-out prompts are not cut further"]


def few(held_out: list[Prompt], options: PruneOptions) -> tuple[list[Prompt], list[str]]:
    """The held-out prompts; where the effort wants few, a random draw of as many as allow one to exceed the budget."""
    enough = prompts_needed(options.exceed, options.confidence, exceeding=1)
    if not options.spent.few_held_out or len(held_out) <= enough:
        return held_out, []
    drawn = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(SEED))[:enough].sort().values
    note = f"--effort {options.effort}: {enough} of {len(held_out)} held-out prompts, drawn at random, test the sets"
    return [held_out[k] for k in drawn.tolist()], [note]
