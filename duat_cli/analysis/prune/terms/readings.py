"""The two exact readings of a term: where it meets the stream (`local`) and carried to the last block (`frozen`).

Both come from the frozen block, which is affine: a term is the difference of two replays, one of them without it, in
the model's own code. `frozen` holds every norm; it is the norm of one summand of Eq. 16, whose bound is the norm of the
sum over a set. `local` is what the removal takes away where the branch meets the stream, the place that the certified
bound speaks of, relative to the stream there. A norm on the branch in front of that place is held for neither: without
the term its scale is s' instead of s, so that of Y, what arrives, Y - (s'/s) Y' is lost, Y' arriving at the old scale.

A neuron k adds a_k ⊗ w_k to its layer's output, so all neurons of a layer follow from how the frozen block carries that
output: token by token a scale, times one matrix.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import gaussian, relative_error, rounding, tolerance_for, wide
from duat_cli.models.block.linears import applied, matrix_of
from duat_cli.models.block.norm_scale import NormScale, norm_scale
from duat_cli.models.budgets import AT_ONCE, NEURONS_AT_ONCE
from duat_cli.models.instrument.held import holding_norms, inner_norms
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.passes import Removal
from duat_cli.models.terms.branches import Branch, Branches, branch_at
from duat_cli.models.terms.sites import BlockSites, Edit, Site, Sites, TermId, by_block, watching

SEED = 31


@dataclass
class Readings:
    """Norms relative to the residual stream: `local` where the term meets it, `frozen` at the last block's output."""

    local: dict[TermId, float] = field(default_factory=dict)
    stream: dict[TermId, float] = field(default_factory=dict)  # where it meets: root mean square of the tokens' norms
    frozen: dict[TermId, float] = field(default_factory=dict)
    cosine: dict[int, float] = field(default_factory=dict)  # block call -> mean over tokens of cos(input, output)
    angle: dict[int, float] = field(default_factory=dict)  # mean over tokens of the angle / π
    reasons: dict[TermId, str] = field(default_factory=dict)  # why a term has no local reading

    def measured(self, terms: Iterable[TermId], lost: Sequence[float], stream: Tensor) -> None:
        """What goes with each term, Frobenius norm over the tokens, and the stream that it is missing from."""
        size = float(torch.linalg.vector_norm(wide(stream)))
        for term, norm in zip(terms, lost, strict=True):
            if size:
                self.local[term] = norm / size
            else:
                self.reasons[term] = "the stream is zero where it meets it"
            self.stream[term] = size / stream.shape[-2] ** 0.5


class Reader:
    """Behind every block of one prompt's sweep: measures the block's terms, and carries those that are followed."""

    def __init__(self, sites: Sites, branches: Branches, wanted: Sequence[TermId], followed: set[TermId]) -> None:
        self.found = Readings()
        self._sites, self._branches = sites, branches
        self._wanted = by_block(wanted)
        self._followed = followed
        self._carried: dict[TermId, Tensor] = {}  # followed terms so far, (1, N, M) each, as one tensor there twice

    def __call__(self, run: BlockRun) -> None:
        self._carry(run)
        here = _Here(run, self._sites[run.parts.module], self._branches[run.parts.module])
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
        """The readings; `output` is the last block's, (1, N, M)."""
        size = _size(output)
        if not size:
            raise UnsupportedModelError("the last block's output is zero throughout: nothing can be relative to it")
        self.found.frozen = {term: _size(part) / size for term, part in self._carried.items()}
        return self.found

    def _carry(self, run: BlockRun) -> None:
        """The followed terms through this block's linear part."""
        if self._carried:
            move(run, list(self._carried.values()))

    def _read(self, here: _Here, term: TermId) -> Tensor:
        """local of one term that is no neuron; its part of the block's output, (1, N, M), with every norm held."""
        if term.kind == "block":
            difference = here.run.output - here.run.input
            self.found.measured([term], [_size(difference)], here.run.output)
            return difference
        site, place = here.sites.find(term)
        without = here.without(site, place)
        branch = here.branch_of(site)
        try:
            if isinstance(branch, str):
                raise UnsupportedModelError(branch)
            lost = here.lost(branch, here.reacting(site, place) or without, whole=term.kind in ("attention", "ffn"))
            self.found.measured([term], [_size(lost)], branch.met(here.whole))
        except UnsupportedModelError as fault:
            self.found.reasons[term] = str(fault)
        return here.whole.end - without.end

    def _neurons(self, here: _Here, site: Site, wanted: list[TermId]) -> dict[TermId, Tensor]:
        """local of every neuron of a layer; of those that are followed their part of the block's output."""
        neurons = _Neurons(here, site)
        branch = here.branch_of(site)
        places = [0 if t.index is None else t.index - site.offset for t in wanted]
        try:
            if isinstance(branch, str):
                raise UnsupportedModelError(branch)
            lost = neurons.lost(branch)[places]
            self.found.measured(wanted, lost.tolist(), branch.met(here.whole))
        except UnsupportedModelError as fault:
            self.found.reasons |= dict.fromkeys(wanted, str(fault))
        return {t: neurons.carried(k) for t, k in zip(wanted, places, strict=True) if t in self._followed}

    def _angles(self, run: BlockRun) -> None:
        cosine = torch.nn.functional.cosine_similarity(wide(run.input[0]), wide(run.output[0]), dim=-1).double()
        self.found.cosine[run.index] = float(cosine.mean())
        self.found.angle[run.index] = float((cosine.clamp(-1, 1).acos() / torch.pi).mean())


class _Here:
    """One block under one prompt, replayed with everything in place, and without what is asked for."""

    def __init__(self, run: BlockRun, sites: BlockSites, branches: Mapping[Site, Branch | str]) -> None:
        self.run, self.sites, self._branches = run, sites, branches
        self._given = [unit.output[None] for unit in run.units]
        self.whole = run.replay(run.input, self._given)
        self._gone: dict[Site, Replay] = {}
        self._scales: dict[nn.Module, NormScale] = {}

    def branch_of(self, site: Site) -> Branch | str:
        """The branch that the site's terms are part of, or why it is not known."""
        return branch_at(self._branches, site)

    def without(self, site: Site, place: int) -> Replay:
        """The block without one term of the site."""
        edit = self._edit(site, place)
        if site.kind != "expert":
            with watching([site], edit):
                return self.run.replay(self.run.input, self._given)
        return self.run.replay(self.run.input, given_without(self.run, [site], edit))

    def reacting(self, site: Site, place: int) -> Replay | None:
        """The same where the norms between experts and the end of their module react; None where there are none."""
        if site.kind != "expert" or not self._norms_inside:
            return None
        edit = self._edit(site, place)
        return self.run.replay(self.run.input, given_without(self.run, [site], edit, react=True))

    @functools.cached_property
    def _norms_inside(self) -> bool:
        return any(inner_norms(self.run, unit.module) for unit in self.run.units)

    def _edit(self, site: Site, place: int) -> Edit:
        mask = torch.ones(site.count, device=self.run.input.device)
        mask[place] = 0
        return Removal({site: mask}).edit

    def arrived(self, branch: Branch, replay: Replay) -> Tensor:
        """What of the branch arrives where it meets the stream, (1, N, M); the bias of its own norm left out."""
        if branch.site not in self._gone:
            self._gone[branch.site] = self.without(branch.site, 0)
        return branch.met(replay) - branch.met(self._gone[branch.site])

    def scale(self, branch: Branch) -> NormScale:
        """Of the norm on the branch."""
        norm = branch.norm
        assert norm is not None
        if norm not in self._scales:
            self._scales[norm] = norm_scale(norm, self.run.parts.norms[norm], branch.in_front_of_norm(self.whole))
        return self._scales[norm]

    def lost(self, branch: Branch, without: Replay, *, whole: bool) -> Tensor:
        """What is missing where the branch meets the stream, (1, N, M). whole: the whole branch is gone."""
        if branch.norm is None or whole:
            return branch.met(self.whole) - branch.met(without)
        scale = self.scale(branch)
        before, after = (scale.square(branch.in_front_of_norm(replay)) for replay in (self.whole, without))
        kept = scale.ratio(before, after)[..., None] * self.arrived(branch, without)
        return self.arrived(branch, self.whole) - kept


class _Neurons:
    """The neurons of one layer: activations (N, I), and how the layer's output goes on from there."""

    def __init__(self, here: _Here, site: Site) -> None:
        self._here, self._run = here, here.run
        self._site = site
        self._activations = activations(here.run, site)
        self._weight = matrix_of(site.module, site.count).to(self._activations)  # (I, M)
        self._base = self._through(here.run.input.new_zeros(1, here.run.input.shape[1], self._weight.shape[1]))

    def carried(self, place: int) -> Tensor:
        """One neuron's part of the block's output, (1, N, M)."""
        outer = self._activations[:, place, None] * self._weight[place]
        return self._through(outer[None].to(self._run.input)).end - self._base.end

    def lost(self, branch: Branch) -> Tensor:
        """What goes with each neuron where the branch meets the stream, Frobenius norm over the tokens, (I,)."""
        tokens, rows_of = self._transfer(branch)
        step = len(tokens) * max(1, NEURONS_AT_ONCE // len(tokens))  # as many rows as tokens go through in one replay
        pieces = range(0, len(self._weight), step)
        return torch.cat([self._lost(branch, tokens, rows_of, slice(k, k + step)) for k in pieces])

    def _lost(self, branch: Branch, tokens: Tensor, rows_of: Callable[[Tensor], Tensor], here: slice) -> Tensor:
        rows, activations = rows_of(self._weight[here]), self._activations[:, here]
        parts = activations * tokens[:, None]  # what arrives of neuron k at token i is parts_ik rows_k
        if branch.norm is None:
            return parts.norm(dim=0) * rows.norm(dim=1)
        arrived = self._here.arrived(branch, self._here.whole)[0].double()
        ratio, parts, rows = self._ratio(branch, here), parts.double(), rows.double()
        # |Y - r (Y - p w)|² of every neuron and token, Y being what arrives with all of them.
        least = (1 - ratio).square() * arrived.square().sum(dim=-1, keepdim=True)
        mixed = 2 * (1 - ratio) * ratio * parts * (arrived @ rows.T)
        own = (ratio * parts).square() * rows.square().sum(dim=-1)
        return (least + mixed + own).sum(dim=0).clamp_min(0).sqrt()

    def _ratio(self, branch: Branch, here: slice) -> Tensor:
        """By what the scale of the branch's norm is multiplied at each token without each of these neurons, (N, I)."""
        scale = self._here.scale(branch)
        x = scale.centered(branch.in_front_of_norm(self._here.whole)[0])
        rows, activations = scale.centered(self._weight[here]), self._activations[:, here].double()
        before = x.square().sum(dim=-1, keepdim=True)
        after = before - 2 * activations * (x @ rows.T) + activations.square() * rows.square().sum(dim=-1)
        return scale.ratio(before, after.clamp_min(0))

    def _through(self, value: Tensor) -> Replay:
        return behind_layer(self._run, self._here.sites, self._site, value)

    def _transfer(self, branch: Branch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """How the layer's output arrives at the stream: a scale a token, (N,), and what makes of neurons' rows, (I, M),
        the rows that arrive."""
        count, width = self._run.input.shape[1], self._weight.shape[1]
        vector = gaussian((width,), self._run.input, SEED)
        replay = self._through(vector.expand(1, count, width))
        arrived = wide(branch.met(replay) - branch.met(self._base))[0]  # (N, M): t_i (v D)
        sent = wide(vector).expand(count, width)
        if branch.norm is None and arrived.shape == sent.shape and relative_error(arrived, sent) <= 1e-6:
            return torch.ones(count, device=arrived.device), lambda rows: rows
        if branch.norm is not None:
            seen = wide(branch.in_front_of_norm(replay) - branch.in_front_of_norm(self._base))[0]
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
                out = wide(branch.met(self._through(items)) - branch.met(self._base))[0, : len(piece)]
                found.append(out / scale[: len(piece), None])
            return torch.cat(found)

        return scale, arriving


def move(run: BlockRun, changes: Sequence[Tensor]) -> None:
    """Put in the place of changes of the block's input what they are at its output, everything dynamic held.

    changes: (items, N, M) each. Some at once, so that no second copy of all of them is ever there.
    """
    items = [item for change in changes for item in change.split(1)]
    base = run.replay(torch.zeros_like(run.input)).end
    for start in range(0, len(items), AT_ONCE):
        some = items[start : start + AT_ONCE]
        ends = run.replay(torch.cat(some)).end
        for item, end in zip(some, ends, strict=True):
            torch.sub(end, base[0], out=item[0])


def activations(run: BlockRun, site: Site) -> Tensor:
    """The neurons' activations, (N, I), from the unit's recorded input or output."""
    unit = next(u for u in run.units if u.module is site.unit)
    if not holds(unit.module, site):  # the layer stands behind the unit
        return wide(unit.output.reshape(-1, site.count))
    seen: list[Tensor] = []

    def see(_: Site, value: Tensor, __: Tensor | None) -> None:
        seen.append(value)

    with watching([site], see):
        unit.module(unit.input)
    return wide(seen[0].reshape(-1, seen[0].shape[-1]))


def behind_layer(run: BlockRun, sites: BlockSites, site: Site, values: Tensor) -> Replay:
    """The frozen block on streams of zeros with these as what the FFN's last layer, which reads the neurons of `site`,
    puts out: (items, N, width)."""

    def put(_: Site, tensor: Tensor, __: Tensor | None) -> Tensor:
        return values.reshape(tensor.shape).to(tensor).clone()  # blocks may write to it

    end = next(end for end in sites.of("ffn") if holds(end.module, site))
    zero = torch.zeros_like(run.input).expand(len(values), -1, -1)
    # In front of any norm on the branch, which is held as all else is. Attention is not silenced: what such a layer
    # puts out in front of it goes on through its values.
    with watching([Site("ffn", end.module, "output", 1)], put):
        return run.replay(zero)


def given_without(run: BlockRun, sites: Sequence[Site], edit: Edit, *, react: bool = False) -> list[Tensor]:
    """What the units give with an edit in force at those of these sites that they hold. A replay does not run units:
    they run here, from their recorded inputs, and the norms in them are held, unless they are to react."""
    found, calls = [], Counter[nn.Module]()
    for unit in run.units:
        call = calls[unit.module]
        calls[unit.module] += 1
        output, here = unit.output, [site for site in sites if holds(unit.module, site)]
        if any(site.routing is not None and site.module is unit.module for site in here):
            raise UnsupportedModelError(
                "experts that are handed their router's weights cannot run apart from it; leave them out with "
                "--granularity"
            )
        if here:
            norms = contextlib.nullcontext() if react else holding_norms(run, unit.module, call)
            with watching(here, edit), norms:
                output = applied(unit.module, unit.input)
        found.append(output[None])
    return found


def holds(module: nn.Module, site: Site) -> bool:
    """Whether the site's module is this one, or inside it."""
    return any(site.module is inner for inner in module.modules())


def _size(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(wide(x)))
