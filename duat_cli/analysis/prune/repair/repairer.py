"""Sets of terms with their repair: what it changes, and the damage without it and with it on any prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from duat_cli.analysis.prune.repair.consumers import consumers
from duat_cli.analysis.prune.repair.refit import Calls, Refit, Refitting
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.loading.prompts import Prompt
from duat_cli.models.edits.exchanged import exchanged
from duat_cli.models.terms.sites import TermId
from duat_cli.results.base import Skipped

Say = Callable[[str, int, int], None]  # what is done, steps done, steps in all
Damages = list[tuple[float, float]]
"""Of every prompt: without the repair, and with it."""


@dataclass(frozen=True)
class Repaired:
    """A set with its repair."""

    refit: Refit
    damages: Damages
    """On the prompts that choose sets."""
    dropped: bool
    """Whether the repair is left out: it did not lower the mean damage on these prompts, or on unfitted ones."""

    @property
    def before(self) -> float:
        return sum(before for before, _ in self.damages) / len(self.damages)

    @property
    def after(self) -> float:
        return self.before if self.dropped else sum(after for _, after in self.damages) / len(self.damages)

    def in_place(self) -> AbstractContextManager[None]:
        """While active, the model has the repaired weights; the set itself is still to be taken out."""
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
        say: Say,
    ) -> None:
        """prompts: those that choose sets. calibration: what layers are fitted to. dtype: of the stored weights."""
        self._ablator, self._prompts, self._say = ablator, prompts, say
        self.calibration = calibration
        self._consumers, self.left = consumers(model, ablator.structure, ablator.sites)
        calls = []
        for k, prompt in enumerate(calibration):
            say("recording calibration prompts", k, len(calibration))
            calls.append(Calls.of(ablator.structure, ablator.record(ablator.place(prompt)).calls))
        self._refitting = Refitting(ablator.structure, self._consumers, calls, dtype)
        self._folds: list[tuple[Refitting, Sequence[Prompt]]] = []
        """One half of the prompts is judged with what is fitted to the other; none where other prompts choose sets."""
        if len(calls) > 1 and {one.sha256 for one in prompts} & {one.sha256 for one in calibration}:
            self._folds = [
                (Refitting(ablator.structure, self._consumers, calls[1 - k :: 2], dtype), calibration[k::2])
                for k in range(2)
            ]
        self.tokens = self._refitting.tokens

    def repaired(self, terms: Sequence[TermId]) -> Repaired:
        """The repair of a set, kept where it lowers the mean damage on the prompts that choose sets, and each half's
        repair that on the other half."""
        what = f"repair without {len(terms)} terms"
        unfitted = Damages()
        for refitting, others in self._folds:
            half = self._fitted(refitting, terms, f"{what}: half of the prompts")
            unfitted += self.damages(terms, half, others, f"{what}: damage of the other half")
        found = self._fitted(self._refitting, terms, what)
        found.damages.extend(self.damages(terms, found, self._prompts, f"{what}: damage"))
        return replace(found, dropped=not all(_lower(each) for each in (found.damages, unfitted) if each))

    def _fitted(self, refitting: Refitting, terms: Sequence[TermId], what: str) -> Repaired:
        def tick(done: int, total: int) -> None:
            self._say(f"{what}: block", done, total)

        return Repaired(refitting.refit(self._ablator.removals(terms), tick), [], dropped=False)

    def damages(self, terms: Sequence[TermId], repaired: Repaired, prompts: Sequence[Prompt], what: str) -> Damages:
        """What the set does to prompts."""
        gone, found = self._ablator.removals(terms), Damages()
        for k, prompt in enumerate(prompts):
            self._say(what, k, len(prompts))
            ids = self._ablator.place(prompt)
            recorded = self._ablator.record(ids)
            before = after = self._ablator.damage(recorded, ids, gone)
            if repaired.refit.values and not repaired.dropped:
                with repaired.in_place():
                    after = self._ablator.damage(recorded, ids, gone)
            found.append((before, after))
        return found

    def skipped(self, refits: Sequence[Refit]) -> list[Skipped]:
        """What was left as it is."""
        why = "it does not run once for every token: other tokens meet it once the stream has moved"
        odd = sorted({number for refit in refits for number in refit.irregular})
        return [*self.left, *(Skipped(what=f"a layer of block {number}", why=why) for number in odd)]


def _lower(damages: Damages) -> bool:
    return sum(after for _, after in damages) < sum(before for before, _ in damages)
