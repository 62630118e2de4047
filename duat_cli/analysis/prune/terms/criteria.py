"""Criteria in common use, computed for the same terms, so that their rankings can be compared with measured damage.

- magnitude: Frobenius norm of the term's weights in the last layer that it goes through; for a block, of all weights.
- activation x norm: norm of the term's activations times that magnitude.
- wanda: Σ |W_ij| ‖X_i‖ over the term's weights there (Sun et al. 2023, summed over a structure).
- taylor: |gradient of the loss x activation| (Molchanov et al. 2019), where the model has a loss.
- shortgpt: 1 - cosine of a block's input and output (Men et al. 2024); angular: their angle / π (Gromov et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duat_cli.analysis.prune.terms.readings import Readings
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import Kind
from duat_cli.models.arrays import wide
from duat_cli.models.block.linears import matrix_of
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.terms.sites import Site, Sites

Scores = dict[str, Tensor]  # criterion -> (terms,) scores, NaN where not defined

ENTRIES = 1 << 20  # how many weights are in float64 at once


class Activations:
    """Sums of squares, over the tokens of all prompts, of every feature that a site's layer reads."""

    def __init__(self) -> None:
        self.squares: dict[tuple[int, Site], Tensor] = {}

    def see(self, number: int, site: Site, value: Tensor) -> None:
        """Adds the value of a site; to be called for every site of every pass."""
        if site.place == "input":
            self._add((number, site), wide(value).reshape(-1, value.shape[-1]).square().double().sum(dim=0))

    def add(self, other: Activations) -> None:
        """Adds the sums of further prompts."""
        for key, total in other.squares.items():
            self._add(key, total)

    def _add(self, key: tuple[int, Site], total: Tensor) -> None:
        self.squares[key] = self.squares.get(key, torch.zeros_like(total)) + total


class WeightScores:
    """magnitude, activation x norm and wanda of neurons, heads, FFNs and attention; magnitude of blocks."""

    def __init__(self, structure: ModelStructure, sites: Sites, terms: TermList, seen: Activations) -> None:
        """seen: activations, which may be added to until `look` is called."""
        self._structure, self._sites, self._terms, self._seen = structure, sites, terms, seen
        self.found: Scores = {name: torch.full((len(terms.ids),), torch.nan, dtype=torch.float64) for name in _WEIGHTS}

    def look(self, number: int) -> None:
        """Computes the scores of one block call, whose weights are in memory."""
        module, starts = self._structure.calls[number], self._terms.starts
        sites = self._sites[module]
        kinds: tuple[tuple[Kind, Kind], ...] = (("neuron", "ffn"), ("head", "attention"))
        for kind, whole in kinds:
            for place, site in enumerate(sites.of(kind)):
                squares = self._seen.squares.get((number, site))
                if squares is None:
                    continue
                rows = matrix_of(site.module, len(squares))
                sums, energy = _row_sums(rows), squares.to(rows.device)
                each, together = (_of_rows(sums, energy, count) for count in (site.count, 1))
                _put(self.found, starts.get((kind, number)), site.offset, each)
                owners = sites.of(whole)
                if len(owners) == len(sites.of(kind)):
                    _put(self.found, starts.get((whole, number)), owners[place].offset, together)
        start = starts.get(("block", number))
        if start is not None:
            every = (some for parameter in module.parameters() for some in parameter.detach().flatten().split(ENTRIES))
            self.found["magnitude"][start] = sum(float(some.double().square().sum()) for some in every) ** 0.5


_WEIGHTS = ("magnitude", "activation x norm", "wanda")


def _row_sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w² and Σ |w| of every row, float64."""
    pieces: list[Tensor] = []
    for some in rows.split(max(1, ENTRIES // rows.shape[1])):
        entries = some.double()
        pieces += [entries.square().sum(dim=1), entries.abs().sum(dim=1)]
    return torch.cat(pieces[::2]), torch.cat(pieces[1::2])


def _of_rows(sums: tuple[Tensor, Tensor], squares: Tensor, count: int) -> list[Tensor]:
    """The three scores of `count` terms with equally many rows each, (count,) each; order as in `_WEIGHTS`."""
    squared, absolute, energy = (one.reshape(count, -1) for one in (*sums, squares))
    magnitude = squared.sum(dim=1).sqrt()
    return [magnitude, energy.sum(dim=1).sqrt() * magnitude, (absolute * energy.sqrt()).sum(dim=1)]


def _put(found: Scores, start: int | None, offset: int, values: list[Tensor]) -> None:
    if start is not None:
        for name, value in zip(_WEIGHTS, values, strict=True):
            found[name][start + offset : start + offset + len(value)] = value.cpu()


def layers_of(structure: ModelStructure, sites: Sites, terms: TermList) -> list[range]:
    """Places in the term list of the neurons, heads or experts that share a layer."""
    kinds: tuple[Kind, ...] = ("neuron", "head", "expert")
    return [
        range(start + site.offset, start + site.offset + site.count)
        for kind in kinds
        for number, module in enumerate(structure.calls)
        if (start := terms.starts.get((kind, number))) is not None
        for site in sites[module].of(kind)
    ]


def block_scores(terms: TermList, readings: Sequence[Readings]) -> Scores:
    """Scores shortgpt and angular of whole blocks, means over the prompts."""
    found: Scores = {name: torch.full((len(terms.ids),), torch.nan, dtype=torch.float64) for name in _BLOCKS}
    for place, term in enumerate(terms.ids):
        if term.kind == "block":
            found["shortgpt"][place] = 1 - sum(r.cosine[term.block] for r in readings) / len(readings)
            found["angular"][place] = sum(r.angle[term.block] for r in readings) / len(readings)
    return found


_BLOCKS = ("shortgpt", "angular")
