"""Repairs of sets of terms: the weights that a repair changes, and the damage without and with it on any prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from duat_cli.analysis.progress import Progress
from duat_cli.analysis.prune.repair.consumers import consumers
from duat_cli.analysis.prune.repair.refit import Calls, Refit, Refitting, outputs
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.loading.prompts import Prompt
from duat_cli.models.budgets import KEPT_BYTES
from duat_cli.models.discovery.modality import Given
from duat_cli.models.edits.surgery import exchanged
from duat_cli.models.sweep.passes import Recorded, record
from duat_cli.models.terms.sites import BlockSites, Site, TermId
from duat_cli.results.base import Skipped

Damages = list[tuple[float, float]]
"""Damage on every prompt, without the repair and with it."""
Key = tuple[int, ...] | str  # as `Prompt.read` returns it


@dataclass(frozen=True)
class Repaired:
    """A set with its repair."""

    refit: Refit
    damages: Damages
    """Damages on the prompts that choose sets."""
    dropped: bool
    """Whether the repair is left out: it did not lower the mean damage on these prompts, or on unfitted ones."""

    @property
    def before(self) -> float:
        return sum(before for before, _ in self.damages) / len(self.damages)

    @property
    def after(self) -> float:
        return self.before if self.dropped else sum(after for _, after in self.damages) / len(self.damages)

    def in_place(self) -> AbstractContextManager[None]:
        """A context in which the model has the repaired weights; the set itself is not removed by it."""
        return exchanged({} if self.dropped else self.refit.values)


class Repairer:
    """Repairs sets of one model, all of them with the same calibration prompts."""

    def __init__(
        self,
        model: nn.Module,
        ablator: Ablator,
        prompts: Sequence[Prompt],
        calibration: Sequence[Prompt],
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        """prompts: those that choose sets. calibration: those that layers are fitted to. dtype: of stored weights."""
        self._ablator, self._prompts, self._progress = ablator, prompts, progress
        self.calibration = calibration
        self._consumers, self.left = consumers(model, ablator.structure, ablator.sites)
        self._kept: dict[Key, Recorded] = {}  # own passes of prompts, as far as they fit; sets are compared with them
        self._room = KEPT_BYTES  # bytes left for them
        self._without: tuple[Sequence[TermId], dict[Key, float]] = ((), {})  # a set, and its damages without repair
        calls, left = [], KEPT_BYTES
        for k, prompt in enumerate(calibration):
            progress(k, len(calibration), "recording calibration prompts")
            calls.append(self._calls(ablator.place(prompt), left))
            left -= sum(one.nbytes for one in calls[-1].after)
        self._refitting = Refitting(ablator.structure, self._consumers, calls, dtype)
        self._folds: list[tuple[Refitting, Sequence[Prompt]]] = []
        """The repair fitted to one half of the prompts, and the other half, on which it is judged; empty where the
        prompts that choose sets are not among those fitted to."""
        if len(calls) > 1 and {one.sha256 for one in prompts} & {one.sha256 for one in calibration}:
            self._folds = [
                (Refitting(ablator.structure, self._consumers, calls[1 - k :: 2], dtype), calibration[k::2])
                for k in range(2)
            ]
        self.tokens = self._refitting.tokens

    def _calls(self, given: Given, left: int) -> Calls:
        """The calls of a calibration prompt; outputs of the dense model are kept if twice their bytes fit in `left`."""
        structure, sites = self._ablator.structure, outputs(self._consumers)
        own: dict[Site, list[Tensor]] = {site: [] for site in sites}

        def see(number: int, site: Site, value: Tensor) -> None:
            own[site].append(value.detach().clone())

        seen = {
            module: BlockSites(tuple(s for s in sites if s.module in set(module.modules())))
            for module in structure.calls
        }
        recorded = record(structure, self._ablator.metric.forward(given), seen, see)
        size = sum(call.after.nbytes for call in recorded.calls)
        return Calls.of(structure, recorded.calls, own if 2 * size <= left else None)

    def repaired(self, terms: Sequence[TermId], limit: float = math.inf) -> Repaired:
        """The repair of a set. It is dropped unless it lowers the mean damage on the prompts that choose sets, and
        unless repairs fitted to each half of the prompts lower it on the other half. limit: of the mean damage; a set
        above it is left out in any case, so its halves are not looked at."""
        what = f"repair without {len(terms)} terms"
        found = self._fitted(self._refitting, terms, what)
        found.damages.extend(self.damages(terms, found, self._prompts, f"{what}: damage"))
        if not _lower(found.damages):
            return replace(found, dropped=True)
        unfitted = Damages()
        for refitting, others in self._folds if found.after <= limit else ():
            half = self._fitted(refitting, terms, f"{what}: half of the prompts", found.refit)
            unfitted += self.damages(terms, half, others, f"{what}: damage of the other half")
        return replace(found, dropped=bool(unfitted) and not _lower(unfitted))

    def _fitted(self, refitting: Refitting, terms: Sequence[TermId], what: str, near: Refit | None = None) -> Repaired:
        def tick(done: int, total: int) -> None:
            self._progress(done, total, f"{what}: block")

        return Repaired(refitting.refit(self._ablator.removals(terms), tick, near), [], dropped=False)

    def damages(self, terms: Sequence[TermId], repaired: Repaired, prompts: Sequence[Prompt], what: str) -> Damages:
        """Damage of the set on each prompt, without and with the repair."""
        gone, found = self._ablator.removals(terms), Damages()
        if self._without[0] != terms:
            self._without = (terms, {})
        without = self._without[1]
        for k, prompt in enumerate(prompts):
            self._progress(k, len(prompts), what)
            given, key = self._ablator.place(prompt), prompt.read
            recorded = self._recorded(given, key)
            if key not in without:
                without[key] = self._ablator.damage(recorded, given, gone)
            after = without[key]
            if repaired.refit.values and not repaired.dropped:
                with repaired.in_place():
                    after = self._ablator.damage(recorded, given, gone)
            found.append((without[key], after))
        return found

    def _recorded(self, given: Given, key: Key) -> Recorded:
        """The recorded pass of a prompt with nothing removed."""
        if key in self._kept:
            return self._kept[key]
        found = self._ablator.record(given)
        size = found.output.nbytes + sum(call.after.nbytes for call in found.calls)
        if size <= self._room:
            self._kept[key] = found
            self._room -= size
        return found

    def skipped(self, refits: Sequence[Refit]) -> list[Skipped]:
        """The layers that were left as they are, with reasons."""
        why = "it does not run once for every token: other tokens meet it once the stream has moved"
        odd = sorted({number for refit in refits for number in refit.irregular})
        return [*self.left, *(Skipped(what=f"a layer of block {number}", why=why) for number in odd)]


def _lower(damages: Damages) -> bool:
    return sum(after for _, after in damages) < sum(before for before, _ in damages)
