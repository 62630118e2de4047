"""Real ablation: terms taken out of the model's own forward pass, and the damage that does."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.damage import Metric
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.sweep.passes import Means, Recorded, Removals, record, removals, run_without
from duat_cli.models.terms.sites import BlockSites, Site, TermId

Tick = Callable[[int, int], None]  # passes done, passes in all


class Ablator:
    """Ablates sets of terms of one model under one metric."""

    def __init__(
        self,
        structure: ModelStructure,
        sites: Mapping[nn.Module, BlockSites],
        metric: Metric,
        means: Means | None = None,
    ) -> None:
        self.structure, self.sites, self.metric, self.means = structure, sites, metric, means

    def place(self, prompt: Prompt) -> Tensor:
        """A prompt's token ids where the model is."""
        return prompt.input_ids.to(self.structure.stack.device)

    def record(self, ids: Tensor) -> Recorded:
        """The unablated pass of a prompt."""
        return record(self.structure, self.metric.forward(ids))

    def damage(self, recorded: Recorded, ids: Tensor, removals: Removals) -> float:
        """What removing all these terms together does to one prompt."""
        output = run_without(self.structure, self.metric.forward(ids), recorded, removals)
        found = self.metric.measured(recorded.output, output, ids)
        if not math.isfinite(found):  # a comparison with a budget would be false, and the set pass for harmless
            blocks = ", ".join(map(str, sorted(removals)[:3])) + (" and others" if len(removals) > 3 else "")
            raise UnsupportedModelError(
                f"with terms of block {blocks} removed, the model's output is not finite in "
                f"{str(output.dtype).removeprefix('torch.')}; a wider --dtype may help"
            )
        return found

    def removals(self, terms: Iterable[TermId]) -> Removals:
        """What to take out of which block call: the same for every prompt."""
        return removals(self.structure, self.sites, terms, self.means)


def measured(ablator: Ablator, prompts: Sequence[Prompt], sets: Sequence[Sequence[TermId]], tick: Tick) -> Tensor:
    """The damage of every set under every prompt, (sets, prompts) float64. One prompt's passes are kept at a time."""
    found = torch.zeros(len(sets), len(prompts), dtype=torch.float64)
    removed = [ablator.removals(terms) for terms in sets]
    for p, prompt in enumerate(prompts):
        ids = ablator.place(prompt)
        recorded = ablator.record(ids)
        for k, gone in enumerate(removed):
            found[k, p] = ablator.damage(recorded, ids, gone)
            tick(p * len(sets) + k + 1, len(sets) * len(prompts))
    return found


def mean_values(
    structure: ModelStructure, sites: Mapping[nn.Module, BlockSites], metric: Metric, inputs: Sequence[Tensor]
) -> Means:
    """The mean over all tokens of what every site holds, and of what every block adds: (width,) each."""
    sums: dict[tuple[int, Site | None], Tensor] = {}
    rows: dict[tuple[int, Site | None], int] = defaultdict(int)  # a module may run twice in a block

    def see(number: int, site: Site, value: Tensor) -> None:
        if site.kind != "expert":
            add(number, site, value)

    def add(number: int, site: Site | None, value: Tensor) -> None:
        total = value.reshape(-1, value.shape[-1]).double().sum(dim=0)
        sums[number, site] = sums.get((number, site), torch.zeros_like(total)) + total
        rows[number, site] += value.numel() // value.shape[-1]

    for ids in inputs:
        recorded = record(structure, metric.forward(ids.to(structure.stack.device)), sites, see)
        for number, call in enumerate(recorded.calls):
            add(number, None, call.after - call.before)
    return {key: total / rows[key] for key, total in sums.items()}
