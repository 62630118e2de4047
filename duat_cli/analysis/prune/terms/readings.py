"""The two exact readings of a term: where it meets the stream (`local`) and carried to the last block (`frozen`).

Each comes from the frozen block, which is affine: a term is the difference of two replays in the model's own code, one
of them without it. `frozen` holds every norm; it is the norm of one summand of Eq. 16, whose bound is the norm of the
sum over a set. `local` is what the removal takes away where the branch meets the stream, relative to the stream there;
the certified bound is for the same place. For these two, a norm on the branch before that place is not held: without
the term its scale is s' instead of s. With Y what arrives, and Y' what arrives without the term at the old scale, the
loss is Y - (s'/s) Y'.

A neuron k adds a_k ⊗ w_k to its layer's output, so all neurons of a layer follow from how the frozen block carries that
output: by one matrix, times a scale for each token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.terms.frozen import FrozenBlock, Neurons
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.arrays import gaussian, relative_error, rounding, tolerance_for, wide
from duat_cli.models.block.norm_scale import NormScale, norm_scale
from duat_cli.models.budgets import NEURONS_AT_ONCE
from duat_cli.models.instrument.held import inner_norms
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.passes import Removal
from duat_cli.models.terms.branches import BlockBranches, Branch, Branches
from duat_cli.models.terms.sites import BlockSites, Site, Sites, TermId, by_block

SEED = 31


@dataclass
class Readings:
    """Norms relative to the residual stream: `local` where the term meets it, `frozen` at the last block's output."""

    local: dict[TermId, float] = field(default_factory=dict)
    stream: dict[TermId, float] = field(default_factory=dict)  # stream at that place: root mean square of token norms
    frozen: dict[TermId, float] = field(default_factory=dict)
    cosine: dict[int, float] = field(default_factory=dict)  # block call -> mean over tokens of cos(input, output)
    angle: dict[int, float] = field(default_factory=dict)  # block call -> mean over tokens of the angle / π
    reasons: dict[TermId, str] = field(default_factory=dict)  # why a term has no local reading

    def measured(self, terms: Iterable[TermId], lost: Sequence[float], stream: Tensor) -> None:
        """Adds local readings. lost: what is lost with each term, Frobenius norm over the tokens; stream: the stream
        that it is missing from."""
        size = float(torch.linalg.vector_norm(wide(stream)))
        for term, norm in zip(terms, lost, strict=True):
            if size:
                self.local[term] = norm / size
            else:
                self.reasons[term] = "the stream is zero where it meets it"
            self.stream[term] = size / stream.shape[-2] ** 0.5


class Reader:
    """Reads terms in one prompt's sweep; called behind every block, where it measures the block's terms and carries
    those that are followed."""

    def __init__(self, sites: Sites, branches: Branches, wanted: Sequence[TermId], followed: set[TermId]) -> None:
        self.found = Readings()
        self._sites, self._branches = sites, branches
        self._wanted = by_block(wanted)
        self._followed = followed
        self._carried: dict[TermId, Tensor] = {}  # followed terms so far, (1, N, M) each: stacking would need a copy

    def __call__(self, run: BlockRun) -> None:
        here = _Here(run, self._sites[run.parts.module], self._branches[run.parts.module])
        if self._carried:
            here.move(list(self._carried.values()))
        terms = self._wanted.get(run.index, [])
        for term in terms:
            if term.kind != "neuron":
                difference = self._read(here, term)
                if term in self._followed:
                    self._carried[term] = difference
        neurons = [term for term in terms if term.kind == "neuron"]
        for site in here.sites.of("neuron"):
            wanted = [t for t in neurons if t.index is not None and 0 <= t.index - site.offset < site.count]
            if wanted:
                self._carried |= self._neurons(here, site, wanted)
        self._angles(run)

    def finish(self, output: Tensor) -> Readings:
        """The readings. output: of the last block, (1, N, M). Raises UnsupportedModelError where it is zero."""
        size = _size(output)
        if not size:
            raise UnsupportedModelError("the last block's output is zero throughout: nothing can be relative to it")
        self.found.frozen = {term: _size(part) / size for term, part in self._carried.items()}
        return self.found

    def _read(self, here: _Here, term: TermId) -> Tensor:
        """Notes `local` of one term that is no neuron; its contribution to the block's output with every norm held,
        (1, N, M)."""
        if term.kind == "block":
            difference = here.run.output - here.run.input
            self.found.measured([term], [_size(difference)], here.run.output)
            return difference
        site, place = here.sites.find(term)
        without = here.without(site, place)
        try:
            branch = here.branch_of(site)
            lost = here.lost(branch, here.reacting(site, place) or without, whole=term.kind in ("attention", "ffn"))
            self.found.measured([term], [_size(lost)], branch.met(here.intact))
        except UnsupportedModelError as fault:
            self.found.reasons[term] = str(fault)
        return here.intact.end - without.end

    def _neurons(self, here: _Here, site: Site, wanted: list[TermId]) -> dict[TermId, Tensor]:
        """Notes `local` of the wanted neurons of a layer; the contributions of those that are followed."""
        neurons = here.neurons(site)
        places = [0 if t.index is None else t.index - site.offset for t in wanted]
        try:
            branch = here.branch_of(site)
            lost = _Lost(here, neurons).norms(branch)[places]
            self.found.measured(wanted, lost.tolist(), branch.met(here.intact))
        except UnsupportedModelError as fault:
            self.found.reasons |= dict.fromkeys(wanted, str(fault))
        return {t: neurons.each(torch.tensor([k])) for t, k in zip(wanted, places, strict=True) if t in self._followed}

    def _angles(self, run: BlockRun) -> None:
        cosine = torch.nn.functional.cosine_similarity(wide(run.input[0]), wide(run.output[0]), dim=-1).double()
        self.found.cosine[run.index] = float(cosine.mean())
        self.found.angle[run.index] = float((cosine.clamp(-1, 1).acos() / torch.pi).mean())


class _Here(FrozenBlock):
    """One block under one prompt, with the places where its branches meet the stream."""

    def __init__(self, run: BlockRun, sites: BlockSites, branches: BlockBranches) -> None:
        super().__init__(run, sites)
        self._branches = branches
        self._gone: dict[Site, Replay] = {}
        self._scales: dict[nn.Module, NormScale] = {}

    @functools.cached_property
    def intact(self) -> Replay:
        """Replay of the block with nothing removed."""
        return self.replay()

    def branch_of(self, site: Site) -> Branch:
        """The branch that the site's terms are part of. Raises UnsupportedModelError where it is not known."""
        branch = self._branches.at(site)
        if isinstance(branch, str):
            raise UnsupportedModelError(branch)
        return branch

    def without(self, site: Site, place: int, *, react: bool = False) -> Replay:
        """Replay of the block without one term of the site. react: as for `replay`."""
        mask = torch.ones(site.count, device=self.run.input.device)
        mask[place] = 0
        return self.replay(Removal({site: mask}), react=react)

    def reacting(self, site: Site, place: int) -> Replay | None:
        """Replay without one expert in which norms between experts and the end of their module react; None for other
        kinds, and where there are no such norms."""
        return self.without(site, place, react=True) if site.kind == "expert" and self._norms_inside else None

    @functools.cached_property
    def _norms_inside(self) -> bool:
        return any(inner_norms(self.run, unit.module) for unit in self.run.units)

    def arrived(self, branch: Branch, replay: Replay) -> Tensor:
        """The branch as it arrives where it meets the stream, (1, N, M), without the bias of the branch's norm."""
        if branch.site not in self._gone:
            self._gone[branch.site] = self.without(branch.site, 0)
        return branch.met(replay) - branch.met(self._gone[branch.site])

    def scale(self, branch: Branch) -> NormScale:
        """Of the norm on the branch."""
        norm = needed(branch.norm)
        if norm not in self._scales:
            self._scales[norm] = norm_scale(norm, self.run.parts.norms[norm], branch.in_front_of_norm(self.intact))
        return self._scales[norm]

    def lost(self, branch: Branch, without: Replay, *, whole: bool) -> Tensor:
        """Loss where the branch meets the stream, (1, N, M). whole: whether the whole branch is gone."""
        if branch.norm is None or whole:
            return branch.met(self.intact) - branch.met(without)
        scale = self.scale(branch)
        before, after = (scale.square(branch.in_front_of_norm(replay)) for replay in (self.intact, without))
        kept = scale.ratio(before, after)[..., None] * self.arrived(branch, without)
        return self.arrived(branch, self.intact) - kept


class _Lost:
    """Losses without each neuron of one layer, where its branch meets the stream."""

    def __init__(self, here: _Here, neurons: Neurons) -> None:
        self._here, self._run, self._neurons = here, here.run, neurons
        self._activations, self._weight = neurons.values, neurons.weight

    def norms(self, branch: Branch) -> Tensor:
        """Frobenius norm of each loss over the tokens, (I,)."""
        tokens, rows_of = self._transfer(branch)
        step = len(tokens) * max(1, NEURONS_AT_ONCE // len(tokens))  # one replay takes as many rows as there are tokens
        pieces = range(0, len(self._weight), step)
        return torch.cat([self._lost(branch, tokens, rows_of, slice(k, k + step)) for k in pieces])

    def _lost(self, branch: Branch, tokens: Tensor, rows_of: Callable[[Tensor], Tensor], here: slice) -> Tensor:
        rows, activations = rows_of(self._weight[here]), self._activations[:, here]
        parts = activations * tokens[:, None]  # what arrives of neuron k at token i is parts_ik rows_k
        if branch.norm is None:
            return parts.norm(dim=0) * rows.norm(dim=1)
        arrived = self._here.arrived(branch, self._here.intact)[0].double()
        ratio, parts, rows = self._ratio(branch, here), parts.double(), rows.double()
        # |Y - r (Y - p w)|² of every neuron and token, with Y what arrives with all neurons.
        least = (1 - ratio).square() * arrived.square().sum(dim=-1, keepdim=True)
        mixed = 2 * (1 - ratio) * ratio * parts * (arrived @ rows.T)
        own = (ratio * parts).square() * rows.square().sum(dim=-1)
        return (least + mixed + own).sum(dim=0).clamp_min(0).sqrt()

    def _ratio(self, branch: Branch, here: slice) -> Tensor:
        """Factor, (N, I), by which the scale of the branch's norm changes at each token without each of these
        neurons."""
        scale = self._here.scale(branch)
        x = scale.centered(branch.in_front_of_norm(self._here.intact)[0])
        rows, activations = scale.centered(self._weight[here]), self._activations[:, here].double()
        before = x.square().sum(dim=-1, keepdim=True)
        after = before - 2 * activations * (x @ rows.T) + activations.square() * rows.square().sum(dim=-1)
        return scale.ratio(before, after.clamp_min(0))

    def _transfer(self, branch: Branch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """How the layer's output arrives at the stream: a scale for each token, (N,), and a function that maps rows of
        neurons, (I, width), to the rows that arrive, (I, M). Raises UnsupportedModelError where it arrives
        otherwise."""
        count, width = self._run.input.shape[1], self._weight.shape[1]
        vector = gaussian((width,), self._run.input, SEED)
        replay = self._neurons.through(vector.expand(1, count, width))
        arrived = wide(branch.met(replay) - branch.met(self._neurons.base))[0]  # (N, M): t_i (v D)
        sent = wide(vector).expand(count, width)
        if branch.norm is None and arrived.shape == sent.shape and relative_error(arrived, sent) <= 1e-6:
            return torch.ones(count, device=arrived.device), lambda rows: rows
        if branch.norm is not None:
            seen = wide(branch.in_front_of_norm(replay) - branch.in_front_of_norm(self._neurons.base))[0]
            if seen.shape != sent.shape or not relative_error(seen, sent) <= rounding(self._run.input.dtype):
                raise UnsupportedModelError("its last layer's output changes on its way to the norm on its branch")
        reference = arrived[int(arrived.norm(dim=1).argmax())]
        scale = (arrived @ reference) / reference.square().sum()
        if not relative_error(scale[:, None] * reference, arrived) <= tolerance_for(self._run.input.dtype):
            raise UnsupportedModelError("what follows the FFN is not the same for every token but for a scale")

        def arriving(rows: Tensor) -> Tensor:
            found = []
            for piece in rows.split(count):
                items = self._run.input.new_zeros(1, count, width)
                items[0, : len(piece)] = piece.to(items)
                out = wide(branch.met(self._neurons.through(items)) - branch.met(self._neurons.base))[0, : len(piece)]
                found.append(out / scale[: len(piece), None])
            return torch.cat(found)

        return scale, arriving


def _size(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(wide(x)))
