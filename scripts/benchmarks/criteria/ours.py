"""duat's sets and repairs, through the door of `duat prune-bound --granularity … --remove …` --ablate, --repair."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.criteria.layers import Layer
from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.repair.repairer import Repaired
from duat_cli.analysis.prune.run import PruneOutcome, prune_bound
from duat_cli.kinds import WHOLE, Kind
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.terms.sites import TermId


@dataclass(frozen=True)
class Ours:
    """One run: an order of terms, and what repairs its beginnings. The order of one round is that of every share."""

    outcome: PruneOutcome

    @property
    def order(self) -> list[TermId]:
        """The least damaging for what it holds first."""
        [nested] = self.outcome.nested.values()
        return nested.order

    def nearest(self, layers: Sequence[Layer], parameters: float) -> list[TermId]:
        """The beginning of the order that holds nearest to as many parameters."""
        each = {(layer.kind, layer.block): layer.parameters for layer in layers}
        held = torch.tensor([each[term.kind, term.block] for term in self.order], dtype=torch.float64).cumsum(dim=0)
        return self.order[: int((held - parameters).abs().argmin()) + 1]

    def repaired(self, terms: Sequence[TermId]) -> Repaired:
        """What the weights become once these terms are out."""
        assert self.outcome.repairer is not None
        return self.outcome.repairer.repaired(terms)


def run(
    loaded: LoadedModel, windows: Tensor, share: float, kinds: tuple[Kind, ...], rounds: int = 1, *, means: bool = False
) -> Ours:
    """On these windows alone, whole as every method sees them, none held out. means: as `--ablate mean`, else what
    repairs sets as well. With `--effort quick` less is told of the sets, which are the same."""
    options = PruneOptions(
        kinds=kinds, joint=len(kinds) > 1, remove=share, rounds=rounds, repair=not means, ablate_mean=means,
        measure=4 if set(kinds) <= WHOLE else 0, whole=True, effort="quick",
    )  # fmt: skip
    return Ours(prune_bound(loaded, prompts_of(windows), [], options, lambda done, total, what: None))


def prompts_of(windows: Tensor) -> list[Prompt]:
    """Windows as prompts. There is no text, so the hash is that of the ids."""
    return [
        Prompt("", hashlib.sha256(str(ids.tolist()).encode()).hexdigest(), ids[None], line)
        for line, ids in enumerate(windows, start=1)
    ]
