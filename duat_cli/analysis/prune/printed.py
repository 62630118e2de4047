"""Eq. 16 with the model itself as f, for every chosen set and every whole part, beside what their removal does."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.order import Group
from duat_cli.analysis.prune.sets.plan import name_of
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.analysis.prune.terms.printed import Printed, PrintedReader
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.analysis.prune.wanted import NOT_ABLATED
from duat_cli.analysis.session import Session
from duat_cli.kinds import WHOLE
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.budgets import PRINTED_BYTES, likely_sets, printed_on, printed_vectors
from duat_cli.models.sweep.lockstep import Pass
from duat_cli.models.terms.sites import TermId
from duat_cli.results.base import Skipped
from duat_cli.results.prune.eq16 import Eq16
from duat_cli.statistics.drawn import interval

_Of: TypeAlias = TermId | tuple[str, int]  # a whole part; or a set, by the name of its order and its size
_Readers: TypeAlias = dict[int, PrintedReader[_Of]]  # by the number of the prompt


class Printing:
    """Eq. 16 on the first prompts: as many as `Spent.printed` says and as fit in memory.

    Where weights are read block by block, Eq. 16 is computed beside passes that read them anyway: the trial of the
    chosen sets or, without a trial, the passes that measure candidates. In the latter it carries the sets that are
    likely to be chosen; only if another one is chosen are the weights read once more.
    """

    def __init__(
        self,
        session: Session,
        ablator: Ablator,
        terms: TermList,
        options: PruneOptions,
        prompts: Sequence[Prompt],
        processes: Processes,
        groups: Sequence[Group],
        *,
        tried: bool,
    ) -> None:
        """groups: one for every order. tried: whether the chosen sets are run again, on held-out prompts."""
        self._session, self._ablator, self._tried = session, ablator, tried
        self._options, self._prompts, self._processes = options, prompts, processes
        self._parts: dict[_Of, list[TermId]] = {term: [term] for term in terms.ids if term.kind in WHOLE}
        self._width, depth = session.structure.hidden_size, len(session.structure.calls)
        counts = {group.name: sum(len(terms.places(kind)) for kind in group.kinds) for group in groups}
        self._vectors = {name: printed_vectors(count, depth) for name, count in counts.items()}
        tokens, every = [prompt.input_ids.shape[1] for prompt in prompts], sum(self._vectors.values())
        self._numbers = printed_on(tokens, options.spent.printed, self._width, 2 * len(self._parts) + every)
        self._tokens = sum(tokens[number] for number in self._numbers)
        self._found: dict[int, dict[_Of, Printed]] = {number: {} for number in self._numbers}

    def readers(self, wanted: Sequence[Nested], decided: Collection[Nested] = ()) -> _Readers:
        """Readers for a sweep beside the passes that measure the candidates `wanted`: of all parts, of the sets chosen
        in `decided`, and of candidates likely to be chosen. Empty where a trial follows, beside which they then run.
        Hand the readers to `keep` afterwards."""
        if self._tried or not self._numbers:
            return {}
        known = 2 * len(self._parts) + sum(self._vectors[one.name] for one in decided)
        each = sum(self._vectors[one.name] for one in wanted)
        most = likely_sets(self._tokens, self._width, known, each)
        sets = self._parts | _chosen(decided)
        for one in wanted:
            sets |= {(one.name, size): one.order[:size] for size in one.likely(self._options.budget, most)}
        return self._readers(sets)

    def keep(self, readers: _Readers) -> None:
        """Stores what the readers found, once they have seen all blocks."""
        for number, reader in readers.items():
            self._found[number] |= reader.found()

    def beside(self, readers: _Readers, passes: Sequence[Pass]) -> None:
        """Run passes, and sweep the prompts for the readers beside them."""
        listeners = list(readers.values())
        self._session.sweep_beside([self._prompts[number] for number in readers], listeners.__getitem__, passes)
        self.keep(readers)

    def of_chosen(self, nested: Mapping[str, Nested], passes: Sequence[Pass]) -> None:
        """Run passes, and beside them compute Eq. 16 for parts and chosen sets that lack it."""
        self.beside(self._readers(self._missing(nested)), passes)

    def rows(self, nested: Mapping[str, Nested], moved: Sequence[Mapping[TermId, float]]) -> list[Eq16]:
        """Rows of the report, one for every whole part and every chosen set. moved: under every prompt, how far the
        ablation of each part moved the output."""
        if not self._numbers or not (wanted := self._parts | _chosen(nested.values())):
            return []
        self._complete(nested)
        changes = {(name, one.chosen.removed): one.chosen.moved for name, one in nested.items() if one.chosen}
        return [
            _row(
                of,
                len(terms),
                [self._found[number][of] for number in self._numbers],
                [moved[k].get(of) if isinstance(of, TermId) else changes[of][k] for k in self._numbers],
                self._options.confidence,
                1 + tolerance_for(self._session.loaded.model.dtype),
            )
            for of, terms in wanted.items()
        ]

    @property
    def skipped(self) -> list[Skipped]:
        """The reason why Eq. 16 is left out, where no prompt fits."""
        if self._numbers:
            return []
        why = f"whole parts and a set of each order take more than {PRINTED_BYTES >> 20} MiB on their way to the last "
        why += "block, under every prompt; shorter ones may fit (--max-tokens)"
        return [Skipped(what="Eq. 16", why=why)]

    def _missing(self, nested: Mapping[str, Nested]) -> dict[_Of, list[TermId]]:
        there = self._found[self._numbers[0]] if self._numbers else {}
        return {of: terms for of, terms in (self._parts | _chosen(nested.values())).items() if of not in there}

    def _complete(self, nested: Mapping[str, Nested]) -> None:
        """Computes Eq. 16 for the parts and chosen sets that lack it."""
        missing, what = self._missing(nested), "Eq. 16 for sets and whole parts"
        if not missing:
            return
        if self._session.weights is not None:
            self._processes(0, 1, what)
            self.of_chosen(nested, ())
            return
        readers = self._readers(missing)

        def under(place: int) -> dict[_Of, Printed]:
            self._processes(place, len(self._numbers), what)
            number = self._numbers[place]
            reader = readers.pop(number)  # frees what the reader carries once this prompt is done
            self._session.sweep_beside([self._prompts[number]], lambda _: reader, ())
            return reader.found()

        found = self._processes.each(under, range(len(self._numbers)))
        for number, row in zip(self._numbers, found, strict=True):
            self._found[number] |= row

    def _readers(self, sets: Mapping[_Of, list[TermId]]) -> _Readers:
        """Readers of these sets for all prompts that fit, by the number of the prompt; empty without sets."""
        if not sets:
            return {}
        gone = {of: self._ablator.removals(terms) for of, terms in sets.items()}
        single = {term for terms in sets.values() for term in terms if term.kind != "neuron"}
        singles = {term: self._ablator.removals([term])[term.block] for term in single}
        return {number: PrintedReader(self._ablator.sites, sets, gone, singles, number) for number in self._numbers}


def _chosen(nested: Iterable[Nested]) -> dict[_Of, list[TermId]]:
    chosen = ((one, one.chosen.removed) for one in nested if one.chosen is not None)
    return {(one.name, size): one.order[:size] for one, size in chosen}


def _row(
    of: _Of, terms: int, found: Sequence[Printed], live: Sequence[float | None], confidence: float, slack: float
) -> Eq16:
    """One row: means over the prompts. live: how far the removal moves the output, per prompt. slack: factor by which
    rounding may exceed the bound."""
    bound = statistics.fmean(one.bound for one in found)
    triangle = statistics.fmean(one.triangle for one in found)
    variance = sum(one.variance for one in found) / len(found) ** 2
    low, high = interval(triangle, variance, confidence)
    real = [value for value in live if value is not None]
    whole = len(real) == len(found)
    measured = statistics.fmean(real) if whole else None
    pairs = list(zip(real, (one.bound for one in found), strict=True)) if whole else []
    reasons: dict[str, str] = {}
    if not whole:
        reasons |= dict.fromkeys(("measured", "ratio", "ratio_largest", "exceeded"), NOT_ABLATED)
    elif not all(one.bound for one in found):
        reasons |= dict.fromkeys(("ratio", "ratio_largest"), "the bound is zero")
    ratios = "ratio" not in reasons
    return Eq16(
        what="part" if isinstance(of, TermId) else "set",
        name=name_of(of) if isinstance(of, TermId) else of[0],
        kind=of.kind if isinstance(of, TermId) else None,
        block=of.block if isinstance(of, TermId) else None,
        terms=terms,
        bound=bound,
        triangle=triangle,
        triangle_low=low,
        triangle_high=high,
        held=statistics.fmean(one.held for one in found),
        error=max(one.error for one in found),
        measured=measured,
        ratio=measured / bound if measured is not None and ratios else None,
        ratio_largest=max(x / y for x, y in pairs) if ratios else None,
        exceeded=sum(x > y * slack for x, y in pairs) if whole else None,
        prompts=len(found),
        reasons=reasons,
    )
