"""The work of `duat prune-bound` on its prompts, in as few passes through the model as possible.

Where all weights are in memory, the prompts run one after the other: each is recorded, its gradients are carried back,
it is read, and its terms are ablated. Where weights are read block by block, all prompts go side by side, and the
weights are read

- once for discovery and recording,
- once, backwards, for the gradients,
- once for readings, certified bounds, scores of weights and ablations of terms and of candidate sets,
- once for the sets of whole parts, which are chosen by what each part does alone,
- and once for the trial of the chosen sets on held-out prompts, with their Eq. 16 beside it (`printed`).

If more passes are needed than may wait at the same time, they go in waves, and each wave reads the blocks from its
first ablation on once more.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.plan.task import PruneOptions, ablated, by_measure
from duat_cli.analysis.prune.printed import Printing
from duat_cli.analysis.prune.responding import Part, Responded, Responder
from duat_cli.analysis.prune.sets.nested import Nested, chosen, measured_sets
from duat_cli.analysis.prune.sets.order import Group, Sizes
from duat_cli.analysis.prune.sets.path import Sketch
from duat_cli.analysis.prune.sets.rivals import Rivals, rivals_of
from duat_cli.analysis.prune.sets.trial import Trial, Tried, trials_of, try_alone, try_together
from duat_cli.analysis.prune.steps import Steps
from duat_cli.analysis.prune.terms.ablation import Ablations, Ablator, Effect, Tick, effects_of, mean_values
from duat_cli.analysis.prune.terms.certified import Certified
from duat_cli.analysis.prune.terms.criteria import Activations, Scores, WeightScores, block_scores, layers_of
from duat_cli.analysis.prune.terms.damage import Interval, Metric
from duat_cli.analysis.prune.terms.ground import ground_of
from duat_cli.analysis.prune.terms.readings import Reader, Readings
from duat_cli.analysis.prune.terms.responses import TermList, Without
from duat_cli.analysis.prune.wanted import Sample, kinds_of, require_set, sample_of
from duat_cli.analysis.session import Listener, Session
from duat_cli.errors import InputError
from duat_cli.kinds import WHOLE, Kind, names_of
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.models.budgets import CARRIED
from duat_cli.models.discovery.modality import placed
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.lockstep import Pass, Visit
from duat_cli.models.sweep.passes import Means, Recorded, RecordingPass, record
from duat_cli.models.terms.sites import TermId
from duat_cli.results.base import Skipped

DRAWN_BY = 4  # prompts whose predictions set the chances with which terms are drawn for ablation


class Work:
    """Everything about the terms of a model, under all prompts."""

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Prompt],
        options: PruneOptions,
        processes: Processes,
        *,
        in_parts: bool = False,
        tried: bool = False,
    ) -> None:
        """in_parts: whether results of prompts are computed by `parts`, or handed to `add`, instead of by `run`.
        tried: as for `Printing`."""
        self.session, self.prompts, self.options, self.processes = session, prompts, options, processes
        self.weights, device = session.weights, session.loaded.device
        dtype = session.loaded.model.dtype
        self._given = [placed(prompt.given, device, dtype) for prompt in prompts]
        beside = [] if self.weights is None or (in_parts and not options.ablate_mean) else self._given
        if self.weights is not None:
            processes(0, 1, f"discovery of the model's structure, {len(beside)} prompts side by side")
        means = options.ablate_mean and self.weights is not None
        self._ground = ground_of(session, options.metric, beside, means=means)
        self.structure, self.sites, self.branches = session.structure, self._ground.sites, self._ground.branches
        self.metric: Metric = self._ground.metric
        self.classes, self.no_loss = self._ground.head.classes, self._ground.no_loss
        self.embeds = self.metric.name == "hidden" and not self._ground.head.predicts and session.loaded.like is None
        self.skipped: list[Skipped] = []
        self.kinds = kinds_of(self.structure, self.sites, options, self.skipped)
        self.terms = TermList.of(self.structure, self.sites, self.kinds)
        singles = sum(ablated(*one, options.measure) for one in self._counts(self.kinds).items())
        self._steps = Steps(processes, len(prompts), singles)
        self.sample: dict[Kind, Sample] = {}  # terms that are ablated one by one, see `draw`
        self._drawn_by: dict[int, Responded] = {}  # of the prompts whose predictions drew the sample
        self.responses: list[Tensor] = []  # one per prompt, (probes, terms)
        self.readings: list[Readings] = []
        self.errors: list[float] = []
        self.nested: dict[str, Nested] = {}
        self.parameters = self._ground.parameters
        self.sizes = Sizes.of(session.loaded.headed, self.structure, self.parameters, self.terms)
        self.groups = [Group(kinds, self.terms, self.sizes, options) for kinds in options.groups(self.kinds)]
        for group in self.groups:
            require_set(options.named, sum(self._counts(group.kinds).values()), group.name)
        if options.rounds > 1 and self.weights is not None:
            raise InputError(
                "--rounds: sketches the model again while weights that are read block by block would be read for every "
                "round; leave it out, or run it where the model fits"
            )
        self.rivals: dict[str, Rivals] = {}  # by the names of the orders; filled by `tested`
        self.moved: list[dict[TermId, float]] = []  # per prompt and ablated term, how far the last block's output moves
        self._damage: dict[TermId, float] = {}  # damage of every ablated term, summed over the prompts
        self._taylor = torch.zeros(len(self.terms.ids), dtype=torch.float64)
        self._scored = 0
        self.losses: list[tuple[float, int]] = []  # each prompt's own loss, nats per token, and the vocabulary's size
        self._seen = Activations() if in_parts else self._ground.seen
        self._scores = WeightScores(self.structure, self.sites, self.terms, self._seen)
        self.certified = Certified(
            self.structure, self.sites, self.branches, device, self.weights, self.kinds, session.loaded.like
        )
        waiting = session.loaded.waiting
        self.ablator = Ablator(self.structure, self.sites, self.metric, self._means(), device, waiting)
        self._responder = Responder(session, self._ground, self.terms, self._given, options.probes, self.ablator.means)
        self.printing = Printing(
            session, self.ablator, self.terms, options, prompts, processes, self.groups, tried=tried
        )

    def _means(self) -> Means | None:
        if not self.options.ablate_mean:
            return None
        if self._ground.sums is not None:
            return self._ground.sums.means()
        self.processes(0, 1, "mean activations")
        return mean_values(self.structure, self.sites, self.metric, [p.given for p in self.prompts])

    # -- prompts -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all prompts, measures sets, and finds the certified bounds and the scores of weights."""
        if self.weights is not None:
            self._together(self._ground.recorded)
            self._ground.recorded.clear()
            return
        if self.processes.count > 1:  # this process compares with the model without instruments, before the others run
            self.session.sweep_beside([self.prompts[0]], lambda _place: lambda _run: None, [])
        self.draw()
        for part in self.processes.each(lambda number: self.parts([number])[0], range(len(self._given))):
            self.add(part)
        self.choose()

    def parts(self, numbers: Sequence[int]) -> list[Part]:
        """Results of some prompts: of one where all weights are in memory; otherwise they go side by side."""
        seen = [Activations() for _ in numbers]
        recorded = self._record(numbers, seen)
        known = all(k in self._drawn_by for k in numbers)
        responded = [self._drawn_by.pop(k) for k in numbers] if known else self._respond(numbers, recorded)
        measured, _ = self._measure(numbers, recorded, responded)
        return [replace(part, seen=one) for part, one in zip(measured, seen, strict=True)]

    def draw(self) -> None:
        """Draws the sample by the first prompts. Must run before any call of `parts`."""
        numbers = list(range(min(DRAWN_BY, len(self.prompts))))
        waves = [[k] for k in numbers] if self.weights is None else [numbers]
        found = [one for some in self.processes.each(self._responded, waves) for one in some]
        self._drawn_by = dict(zip(numbers, found, strict=True))
        self._draw(found)

    def _responded(self, numbers: Sequence[int]) -> list[Responded]:
        return self._respond(numbers, self._record(numbers, [Activations() for _ in numbers]))

    def _draw(self, responded: Sequence[Responded]) -> None:
        prediction = self.metric.of_set(torch.stack([one.responses for one in responded[:DRAWN_BY]])).mean(dim=0)
        self.sample = {k: sample_of(self.terms, k, self.options.measure, prediction) for k in self.kinds}

    @property
    def ablated(self) -> list[TermId]:
        """The terms of the sample, kind by kind."""
        return [self.terms.ids[place] for one in self.sample.values() for place in one.places]

    def _record(self, numbers: Sequence[int], seen: Sequence[Activations]) -> list[Recorded]:
        passes = [
            RecordingPass(self.structure, self.metric.forward(self._given[number]), self.sites, one.see)
            for number, one in zip(numbers, seen, strict=True)
        ]
        self.session.together(passes)
        return [one.recorded for one in passes]

    def add(self, part: Part) -> None:
        """Adds the results of the next prompt."""
        responded = part.responded
        self.responses.append(responded.responses)
        self.readings.append(part.readings)
        self.errors.append(part.error)
        self._seen.add(part.seen)
        if responded.slope is not None:
            self._taylor += responded.slope.double().abs()
            self._scored += 1
        if responded.loss is not None:
            self.losses.append(responded.loss)
        effects = dict(zip(self.ablated, part.effects, strict=True))
        for term, effect in effects.items():
            self._damage[term] = self._damage.get(term, 0.0) + effect.damage
        self.moved.append({term: effect.moved for term, effect in effects.items()})

    def choose(self) -> None:
        """Measures sets and finds certified bounds and scores of weights, once every prompt's part is added."""
        if self.weights is not None:
            recorded = self._record(range(len(self.prompts)), [Activations() for _ in self.prompts])
            self._measure_sets(self.groups, recorded, self._finals())
            return
        wanted = self._chosen(self.groups, self.responses)
        effects = self._effects("sets on the prompts", [terms for one in wanted for terms in one.sets])
        self.nested = measured_sets(wanted, effects, self.options.budget)
        self.processes(0, 1, "certified bounds" if self.options.spent.certified else "magnitudes of the weights")
        finals = self._finals()
        with self._attached(finals):
            self.session.together(finals)

    def _together(self, recorded: Sequence[Recorded]) -> None:
        """Does all of `run` with the prompts side by side, each of them recorded already."""
        numbers = range(len(self.prompts))
        responded = self._respond(numbers, recorded)
        self._draw(responded)
        later = [group for group in self.groups if by_measure(self._counts(group.kinds), self.options.measure)]
        wanted = self._chosen([g for g in self.groups if g not in later], [one.responses for one in responded])
        readers = {} if later else self.printing.readers(wanted)
        parts, sets = self._measure(numbers, recorded, responded, wanted, self._finals(), readers)
        self.printing.keep(readers)
        for part in parts:
            self.add(part)
        self._keep(wanted, sets)
        if later:
            self._measure_sets(later, recorded, [])
            self.nested = {group.name: self.nested[group.name] for group in self.groups}

    def _measure_sets(self, groups: Sequence[Group], recorded: Sequence[Recorded], tail: Sequence[Pass]) -> None:
        """Measures candidate sets after the terms of the sample, where weights are read block by block. tail: passes
        that run with them, last."""
        wanted = self._chosen(groups, self.responses)
        readers = self.printing.readers(wanted, self.nested.values())

        def run(passes: Sequence[Pass]) -> None:
            with self._attached(tail):
                self.printing.beside(readers, [*passes, *tail])

        self._keep(wanted, self.ablator.ablate(lambda: self._sets(wanted, recorded), run, self.session.together))

    def _keep(self, wanted: Sequence[Nested], sets: Sequence[Ablations]) -> None:
        """Keeps measured sets. sets: for every prompt, the ablations of all candidates."""
        self.nested |= measured_sets(wanted, [each.effects for each in sets], self.options.budget)

    def _effects(self, what: str, sets: Sequence[Sequence[TermId]]) -> list[list[Effect]]:
        """Effect of removing each set, under every prompt."""
        return effects_of(self.ablator, self.prompts, sets, self._named(what), self.processes.each)

    def _damages(self, what: str, sets: Sequence[Sequence[TermId]]) -> list[float]:
        """Damage of removing each set, mean over the prompts."""
        effects = self._effects(what, sets)
        return [statistics.fmean(one.damage for one in under) for under in zip(*effects, strict=True)]

    def _chosen(self, groups: Sequence[Group], responses: Sequence[Tensor]) -> list[Nested]:
        """The sets to be measured. responses: one tensor per prompt."""
        known = self.measured()
        places = {k: known[term] for k, term in enumerate(self.terms.ids) if term in known and term.kind in WHOLE}
        sketch, found = Sketch(self.metric, responses, known=places), list[Nested]()
        for group in groups:
            damages = functools.partial(self._damages, f"sets of {names_of(group.name)}")
            found.append(chosen(group, sketch, self._again, damages))
        return found

    def _again(self, gone: Sequence[TermId]) -> Sketch:
        """A sketch of the model without these terms."""
        removals, rows, starts = self.ablator.removals(gone), list[Tensor](), list[float]()
        for number, given in enumerate(self._given):
            self.processes(number, len(self._given), f"responses without {len(gone)} terms")
            output = self.ablator.record(given).output
            recorded = record(self.structure, self.metric.forward(given), gone=removals)
            starts.append(self.metric.measured(output, recorded.output, given))
            rows.append(self._responder.of_metric(number, recorded, Without(removals, output)).alone())
        return Sketch(self.metric, rows, starts)

    def tested(self, held_out: Sequence[Prompt]) -> dict[str, Trial]:
        """Trials of the chosen sets on held-out prompts, by the names of their orders."""
        trials = trials_of(self.nested, len(held_out), self.options)
        if self.options.criteria:
            layers = layers_of(self.structure, self.sites, self.terms)
            self.rivals = rivals_of(self.nested, self.groups, layers, self.scores(), trials)
        run: list[Tried] = [*trials.values(), *self.rivals.values()]
        on = f"on {len(held_out)} held-out prompts"
        if self.weights is not None:
            self.processes(0, 1, f"sets {on}")
            beside = functools.partial(self.printing.of_chosen, self.nested)
            try_together(self.ablator, run, held_out, beside)
        else:
            try_alone(self.ablator, run, held_out, self._named(f"sets {on}"), self.processes.each)
        return trials

    @property
    def damage(self) -> Interval:
        """Predicted damage of every term."""
        return self.metric.predicted(torch.stack(self.responses), self.options.confidence)

    def _named(self, what: str) -> Tick:
        return functools.partial(self.processes, what=what)

    def _counts(self, kinds: Sequence[Kind]) -> dict[Kind, int]:
        return {kind: len(self.terms.places(kind)) for kind in kinds}

    def _respond(self, numbers: Sequence[int], recorded: Sequence[Recorded]) -> list[Responded]:
        self._steps.responding(numbers, len(self.terms.ids))
        return self._responder.of(numbers, recorded)

    # -- readings and ablations --------------------------------------------------------------------------------

    def _terms(self, numbers: Sequence[int], recorded: Sequence[Recorded]) -> list[Ablations]:
        """Ablations of the terms in the sample, under each of these prompts."""
        gone, done = [self.ablator.removals([term]) for term in self.ablated], self._steps.ablating(numbers)
        return [
            self.ablator.ablations(one, self._given[number], gone, done, self.weights)
            for number, one in zip(numbers, recorded, strict=True)
        ]

    def _sets(self, wanted: Sequence[Nested], recorded: Sequence[Recorded]) -> list[Ablations]:
        """Ablations of all candidate sets, under every prompt. Without candidates only some prompts may be recorded."""
        gone = [self.ablator.removals(terms) for one in wanted for terms in one.sets]
        return [
            self.ablator.ablations(one, given, gone, weights=self.weights)
            for given, one in zip(self._given, recorded, strict=bool(wanted))
        ]

    def _measure(
        self,
        numbers: Sequence[int],
        recorded: Sequence[Recorded],
        responded: Sequence[Responded],
        wanted: Sequence[Nested] = (),
        finals: Sequence[Pass] = (),
        printed: Mapping[int, Listener] = MappingProxyType({}),
    ) -> tuple[list[Part], list[Ablations]]:
        """Exact readings of some prompts with ablations of terms, and ablations of sets under all prompts.

        finals: passes that run beside the sweep. printed: further listeners to the sweeps, by the number of the prompt.
        """
        self._steps.reading(numbers)
        readers = {k: Reader(self.sites, self.branches, self.terms.ids, self._followed()) for k in numbers}
        outputs: dict[int, Tensor] = {}
        errors = dict.fromkeys(numbers, 0.0)

        def listener(place: int) -> Listener:
            number, decomposition = numbers[place], Decomposition()

            def listen(run: BlockRun) -> None:
                errors[number] = max(errors[number], decomposition.advance(run).terms.error)
                readers[number](run)
                if number in printed:
                    printed[number](run)
                outputs[number] = run.output

            return listen

        def sweep(passes: Sequence[Pass]) -> None:
            with self._attached(finals):
                self.session.sweep_beside([self.prompts[k] for k in numbers], listener, [*passes, *finals])

        asked = self.ablator.ablate(
            lambda: [*self._terms(numbers, recorded), *self._sets(wanted, recorded)], sweep, self.session.together
        )
        parts = []
        for number, given, one in zip(numbers, responded, asked[: len(numbers)], strict=True):
            readings = readers[number].finish(outputs[number])
            parts.append(Part(given, readings, errors[number], one.effects))
        return parts, asked[len(numbers) :]

    def _finals(self) -> list[Pass]:
        """Passes that need nothing but the weights and the activations summed over all prompts."""
        bounds = self.certified.passes if self.options.spent.certified else []
        return [*bounds, Visit(self.structure.calls, self._scores.look, self.weights)]

    def _attached(self, finals: Sequence[Pass]) -> contextlib.AbstractContextManager[None]:
        """The context in which those passes run, if there are any."""
        return self.certified.attached() if finals and self.options.spent.certified else contextlib.nullcontext()

    def _followed(self) -> set[TermId]:
        """The terms carried to the last block: all but neurons where they are few, and everything that is ablated."""
        others = {term for term in self.terms.ids if term.kind != "neuron"}
        return {*self.ablated, *(others if len(others) <= CARRIED else ())}

    # -- results -----------------------------------------------------------------------------------------------

    def measured(self) -> dict[TermId, float]:
        """Mean damage of the ablated terms."""
        return {term: damage / len(self.prompts) for term, damage in self._damage.items()}

    def scores(self) -> Scores:
        """Every criterion for every term."""
        taylor = {"taylor": self._taylor / self._scored} if self._scored else {}
        return self._scores.found | taylor | block_scores(self.terms, self.readings)
