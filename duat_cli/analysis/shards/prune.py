"""`duat prune-bound --out`: the results kept of each prompt, and the sets that the first process chooses from them.

Responses, exact readings and single ablations are shared among processes and kept prompt by prompt. The sets are then
measured and tested by the first process alone, which keeps the report; only this part runs again for another budget,
for example.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import JsonValue

from duat_cli.analysis.progress import Progress
from duat_cli.analysis.prune.responding import Part, Responded
from duat_cli.analysis.prune.run import Begun, PruneOutcome, conclude
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.terms.ablation import Effect
from duat_cli.analysis.prune.terms.criteria import Activations
from duat_cli.analysis.prune.terms.readings import Readings
from duat_cli.analysis.prune.wanted import Sample
from duat_cli.analysis.prune.work import Work
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.analysis.shards.records import Aside, Packed, PromptRecord, Stored, of_prompt
from duat_cli.analysis.shards.run import Worker, share
from duat_cli.grouping import by_key
from duat_cli.kinds import Kind
from duat_cli.loading.declared.pooling import pooling_of
from duat_cli.loading.prompt_set import PromptSet, key_of
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.texts import PromptText
from duat_cli.results.base import Run
from duat_cli.results.prune.report import PruneReport

_SETS = "sets.json"
_READINGS = ("local", "stream", "frozen")


class Facts(Stored):
    """The terms that every process ablates."""

    sample: dict[Kind, Sample]
    """Sample drawn by the process that began the folder; rounding may make others draw differently."""


class PruneRecord(PromptRecord):
    """Results of one prompt. Numbers for all terms are in the order of `Work.terms`."""

    responses: list[Packed]
    """Responses, float32, by probe."""
    slope: Packed | None
    """Response to the gradient of the loss, float32."""
    loss: tuple[float, int] | None
    error: float
    damages: list[float]
    moved: list[float]
    readings: dict[str, Packed]
    """Readings by name, float64; NaN for a term that has none."""
    reasons: dict[str, list[int]]
    """Reasons why terms have no local reading, with the places of these terms."""
    cosine: dict[int, float]
    angle: dict[int, float]
    seen: list[tuple[int, int, Packed]]
    """Block call, place among the block's sites, and the sums of squares there, float64."""

    @classmethod
    def of(cls, prompt: Prompt, part: Part, work: Work) -> PruneRecord:
        responded, readings = part.responded, part.readings
        places = {term: place for place, term in enumerate(work.terms.ids)}
        values = {}
        for name in _READINGS:
            whole = torch.full((len(places),), torch.nan, dtype=torch.float64)
            known = getattr(readings, name)
            whole[[places[term] for term in known]] = torch.tensor(list(known.values()), dtype=torch.float64)
            values[name] = whole
        return cls(
            **of_prompt(prompt),
            responses=list(responded.responses),
            slope=responded.slope,
            loss=responded.loss,
            error=part.error,
            damages=[effect.damage for effect in part.effects],
            moved=[effect.moved for effect in part.effects],
            readings=values,
            reasons=by_key((why, places[term]) for term, why in readings.reasons.items()),
            cosine=readings.cosine,
            angle=readings.angle,
            seen=[
                (call, work.sites[work.structure.calls[call]].sites.index(site), total)
                for (call, site), total in part.seen.squares.items()
            ],
        )

    def part(self, work: Work) -> Part:
        terms = work.terms.ids
        found = {}
        for name in _READINGS:
            values = self.readings[name].tolist()
            found[name] = {term: value for term, value in zip(terms, values, strict=True) if not math.isnan(value)}
        reasons = {terms[place]: why for why, places in self.reasons.items() for place in places}
        seen = Activations()
        for call, place, total in self.seen:
            site = work.sites[work.structure.calls[call]].sites[place]
            seen.squares[call, site] = total
        readings = Readings(**found, cosine=self.cosine, angle=self.angle, reasons=reasons)
        effects = [Effect(*both) for both in zip(self.damages, self.moved, strict=True)]
        return Part(Responded(torch.stack(self.responses), self.slope, self.loss), readings, self.error, effects, seen)


class SetsRecord(Aside):
    """The final results: report and orders."""

    choice: dict[str, JsonValue]
    """Inputs that only the sets and their cosines depend on: options, hashes of token ids and the rule of pooling."""
    report: PruneReport
    orders: dict[str, list[int]]
    """Places of terms in the order in which they are removed, by the plan's granularity."""


def prune_into(
    path: Path, begun: Begun, max_tokens: int | None, ranks: Ranks, progress: Progress
) -> PruneOutcome | None:
    """Adds this process's results to the folder. The first rank waits for the others and returns the report on all.

    begun: as made by `begin` with `in_parts`.
    """
    worker = _Worker(path, begun, max_tokens, progress)
    folder = share(path, begun.session, _set_of(begun.work.prompts), worker, ranks, progress)
    return None if folder is None else worker.merged(folder)


class _Worker(Worker):
    """The command as a worker for `share`."""

    command = "prune-bound"

    def __init__(self, path: Path, begun: Begun, max_tokens: int | None, progress: Progress) -> None:
        self._path, self._begun, self._progress = path, begun, progress
        options = begun.work.options
        self.settings = {
            "granularity": list(options.kinds),
            "metric": begun.work.metric.name,  # the one used, also if none was given
            "probes": options.probes,
            "measure": options.measure,
            "ablate": "mean" if options.ablate_mean else "zero",
            "effort": options.effort,
            "max_tokens": max_tokens,
        }

    def begin(self, first: Prompt, /, *, own: bool) -> Sequence[PromptRecord]:
        """Compares with the model without instruments, and draws the terms to ablate; no record."""
        self._begun.session.sweep_beside([first], lambda _place: lambda _run: None, [])
        self._begun.work.draw()
        return ()

    def __call__(self, chunk: Sequence[tuple[int, Prompt]]) -> list[PruneRecord]:
        """Records of prompts, which come with their positions."""
        work = self._begun.work
        self._take_sample(Folder.read(self._path))
        found = zip(chunk, work.parts([position for position, _ in chunk]), strict=True)
        return [PruneRecord.of(prompt, part, work) for (_, prompt), part in found]

    def facts(self) -> Facts:
        return Facts(sample=self._begun.work.sample)

    def _take_sample(self, folder: Folder) -> None:
        self._begun.work.sample = Facts.model_validate(folder.manifest.facts).sample

    def merged(self, folder: Folder) -> PruneOutcome:
        """The outcome of all prompts; chooses the sets, if they are not chosen yet."""
        begun, work = self._begun, self._begun.work
        choice = _choice(begun)
        known = folder.aside(_SETS, SetsRecord)
        if known is not None and known.choice == choice:
            return _outcome(begun, known)
        index = folder.complete()
        self._take_sample(folder)
        for _, record in folder.each(index, PruneRecord, self._progress, "reading what the prompts gave"):
            work.add(record.part(work))
        work.choose()
        outcome = conclude(begun)
        places = {term: place for place, term in enumerate(work.terms.ids)}
        orders = {name: [places[term] for term in one.order] for name, one in outcome.nested.items()}
        report = outcome.report
        folder.put_aside(_SETS, SetsRecord(choice=choice, report=report, orders=orders))
        return outcome


def merged(folder: Folder, run: Callable[[], Run], progress: Progress) -> PruneReport:
    """The report, which the first process made. run: is called at the end."""
    folder.complete()
    progress(0, 0, "reading the report")
    known = folder.kept_aside(_SETS, SetsRecord, "the sets are not chosen yet")
    return known.report.model_copy(update={"run": run()})


def _outcome(begun: Begun, known: SetsRecord) -> PruneOutcome:
    work, terms = begun.work, begun.work.terms.ids
    kinds = {group.name: group.kinds for group in work.groups}
    nested = {
        name: Nested(kinds[name], [terms[place] for place in order], [], None) for name, order in known.orders.items()
    }
    report = known.report.model_copy(update={"run": begun.session.run_facts()})
    repairer = begun.repairer()
    return PruneOutcome(
        report, begun.session, nested, work.prompts, begun.held_out, repairer, work.ablator, work.parameters,
        work.no_loss,
    )  # fmt: skip


def _choice(begun: Begun) -> dict[str, JsonValue]:
    names = ("budget", "confidence", "exceed", "uniform", "repair", "joint", "remove", "of_all", "rounds", "criteria")
    chosen = {name: getattr(begun.work.options, name) for name in names}
    pooling = pooling_of(begun.session.loaded.files.path)
    return {
        **chosen,
        "held_out": _digest(begun.held_out),
        "calibration": _digest(begun.calibration),
        "pooling": pooling if isinstance(pooling, str) else pooling.name,
    }


def _digest(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(repr([(p.sha256, p.input_ids.tolist()) for p in prompts]).encode()).hexdigest()


def _set_of(prompts: Sequence[Prompt]) -> PromptSet:
    """The set of prompts that are all in memory and tokenized."""
    keys = array("Q", (key_of(prompt.sha256) for prompt in prompts))
    texts = [_as_given(prompt, number) for number, prompt in enumerate(prompts, 1)]
    known = {(text.text, text.line): prompt for text, prompt in zip(texts, prompts, strict=True)}
    return PromptSet(texts, keys, lambda some: [known[text.text, text.line] for text in some])


def _as_given(prompt: Prompt, number: int) -> PromptText:
    """The prompt's text; with token ids, if its hash shows that these were given instead of a text."""
    text = PromptText(prompt.messages or prompt.text, f"prompt {number}", prompt.line)
    return text if text.sha256 == prompt.sha256 else replace(text, ids=tuple(prompt.input_ids[0].tolist()))
