"""Eq. 16 as printed for every chosen set and every whole part, beside what their removal does."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from duat_cli.analysis.prune.report import NOT_ABLATED
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.plan import name_of
from duat_cli.analysis.prune.terms.ablation import Ablations
from duat_cli.analysis.prune.terms.printed import Printed, PrintedReader
from duat_cli.analysis.prune.work import Work
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.sweep.budgets import PRINTED_BYTES, PRINTED_TERMS, printed_on
from duat_cli.models.sweep.lockstep import Pass
from duat_cli.models.sweep.passes import Leading
from duat_cli.models.terms.sites import TermId
from duat_cli.results.base import Skipped
from duat_cli.results.prune.eq16 import Eq16
from duat_cli.statistics.drawn import interval

WHOLE = ("block", "attention", "ffn")
_Row = tuple[list[Printed], list[float]]  # of one prompt: every set; and how far the chosen ones move the output


class Printing:
    """Eq. 16 on the first prompts, as many as `Spent.printed` says and as fit.

    Weights that are read block by block are read once for it, and not at all where other passes need them anyway.
    """

    def __init__(self, work: Work, nested: Mapping[str, Nested]) -> None:
        self._work = work
        chosen = {name: one.order[: one.chosen.removed] for name, one in nested.items() if one.chosen is not None}
        self._parts = [term for term in work.terms.ids if term.kind in WHOLE]
        self._names = list(chosen)
        self._sets: list[list[TermId]] = [*([term] for term in self._parts), *chosen.values()]
        followed = sum(min(len(terms), PRINTED_TERMS) for terms in chosen.values())
        lengths = [prompt.input_ids.shape[1] for prompt in work.prompts]
        most, width = work.options.spent.printed, work.structure.hidden_size
        self._numbers = printed_on(lengths, most, width, len(self._sets), followed)
        self._gone = [work.ablator.removals(terms) for terms in self._sets]
        single = {t for terms in self._sets for t in terms if t.kind != "neuron"}
        self._singles = {t: work.ablator.removals([t])[t.block] for t in single}
        self._found: list[list[Printed]] = []  # a prompt, a set
        self._moved: list[list[float]] = []  # a prompt, a chosen set: how far its removal moves the output

    def beside(self, passes: Sequence[Pass]) -> None:
        """Run passes, and what this needs beside the first of them."""
        if self._found or not self._numbers:
            self._work.session.together(passes)
        else:
            self._keep(self._sweep(self._numbers, passes))

    def rows(self) -> list[Eq16]:
        """Of every whole part and every chosen set; their errors go into those of the certificate."""
        work = self._work
        if not self._sets:
            return []
        if not self._numbers:
            why = f"{len(self._sets)} sets and parts take more than {PRINTED_BYTES >> 20} MiB on their way to the last "
            why += "block, under every prompt; shorter ones may fit (--max-tokens)"
            work.skipped.append(Skipped(what="Eq. 16 as printed", why=why))
        if not self._found and self._numbers:
            waves = [[number] for number in self._numbers] if work.weights is None else [self._numbers]

            def under(place: int) -> list[_Row]:
                work.processes(place, len(waves), "Eq. 16 for sets and whole parts")
                return self._sweep(waves[place], ())

            for rows in work.processes.each(under, range(len(waves))):
                self._keep(rows)
        work.errors += [one.error for row in self._found for one in row]
        return [self._row(k) for k in range(len(self._sets))] if self._found else []

    def _keep(self, rows: Sequence[_Row]) -> None:
        for found, moved in rows:
            self._found.append(found)
            self._moved.append(moved)

    def _sweep(self, numbers: Sequence[int], others: Sequence[Pass]) -> list[_Row]:
        """Some prompts, with their chosen sets really removed, and other passes behind them."""
        work, chosen = self._work, self._gone[len(self._parts) :]
        readers = [PrintedReader(work.sites, self._sets, self._gone, self._singles, number) for number in numbers]
        passes, live = list[Pass](), list[Ablations]()
        for number in numbers:
            ids = work.ablator.place(work.prompts[number])
            own = Leading(work.structure, work.metric.forward(ids))
            live.append(work.ablator.ablations(own, ids, chosen))
            passes += [own, *live[-1].passes] if chosen else []
        work.session.sweep_beside(
            [work.prompts[number] for number in numbers], lambda place: readers[place], [*passes, *others]
        )
        if not work.ablator.settled(live):
            return self._sweep(numbers, ())
        return [(reader.found(), [one.moved for one in row.effects]) for reader, row in zip(readers, live, strict=True)]

    def _row(self, place: int) -> Eq16:
        found, work = [row[place] for row in self._found], self._work
        if place < len(self._parts):
            part = self._parts[place]
            return _row(work, part, 1, found, [work.moved[number].get(part) for number in self._numbers])
        number = place - len(self._parts)
        live = [row[number] for row in self._moved]
        return _row(work, self._names[number], len(self._sets[place]), found, live)


def _row(work: Work, of: TermId | str, terms: int, found: Sequence[Printed], live: Sequence[float | None]) -> Eq16:
    """Means over the prompts."""
    part = of if isinstance(of, TermId) else None
    bound = statistics.fmean(one.bound for one in found)
    triangle = statistics.fmean(one.triangle for one in found)
    variance = sum(one.variance for one in found) / len(found) ** 2
    low, high = interval(triangle, variance, work.options.confidence)
    real = [value for value in live if value is not None]
    whole = len(real) == len(found)
    measured = statistics.fmean(real) if whole else None
    slack = 1 + tolerance_for(work.session.loaded.model.dtype)
    pairs = list(zip(real, (one.bound for one in found), strict=True)) if whole else []
    reasons: dict[str, str] = {}
    if not whole:
        reasons |= dict.fromkeys(("measured", "ratio", "ratio_largest", "exceeded"), NOT_ABLATED)
    elif not all(one.bound for one in found):
        reasons |= dict.fromkeys(("ratio", "ratio_largest"), "the bound is zero")
    ratios = "ratio" not in reasons
    return Eq16(
        what="set" if part is None else "part",
        name=name_of(part) if part is not None else str(of),
        kind=None if part is None else part.kind,
        block=None if part is None else part.block,
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
