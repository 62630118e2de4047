"""The two exact readings of a term: at its place (`local`) and carried to the last block (`frozen`, Eq. 16).

Both come from the frozen block, which is affine: a term is the difference of two replays, one of them without it, in
the model's own code, whatever norm stands behind it. A neuron k adds a_k ⊗ w_k to its layer's output, so all neurons
of a layer follow from how the frozen block carries that output: token by token a scale, times one matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import gaussian, relative_error, tolerance_for, wide
from duat_cli.models.feedforward import matrix_of
from duat_cli.models.passes import Removal
from duat_cli.models.rig import BlockRun, zero_given
from duat_cli.models.sites import BlockSites, Edit, Site, TermId, watching

ITEMS_AT_ONCE = 32
SEED = 31


@dataclass
class Readings:
    """Norms relative to the residual stream: `local` to the block's output, `frozen` to the last block's output."""

    local: dict[TermId, float] = field(default_factory=dict)
    frozen: dict[TermId, float] = field(default_factory=dict)
    cosine: dict[int, float] = field(default_factory=dict)  # block call -> mean over tokens of cos(input, output)
    angle: dict[int, float] = field(default_factory=dict)  # mean over tokens of the angle / π
    reasons: dict[TermId, str] = field(default_factory=dict)  # why a term has no local reading


class Reader:
    """Behind every block of one prompt's sweep: measures the block's terms, and carries those that are followed."""

    def __init__(self, sites: Mapping[nn.Module, BlockSites], wanted: Sequence[TermId], followed: set[TermId]) -> None:
        self.found = Readings()
        self._sites = sites
        self._wanted: dict[int, list[TermId]] = defaultdict(list)
        for term in wanted:
            self._wanted[term.block].append(term)
        self._followed = followed
        self._names: list[TermId] = []
        self._carried: Tensor | None = None  # (followed terms so far, N, M)

    def __call__(self, run: BlockRun) -> None:
        self._carry(run)
        size = float(torch.linalg.vector_norm(wide(run.output)))
        sites = self._sites[run.parts.module]
        terms = self._wanted[run.index]
        fresh: dict[TermId, Tensor] = {}
        given = [unit.output[None] for unit in run.units]
        whole = _output(run, run.input, given)
        for term in terms:
            if term.kind == "neuron":
                continue
            if term.kind == "block":
                difference = run.output - run.input
            else:
                difference = whole - self._without(run, sites, term, given)
            self.found.local[term] = float(torch.linalg.vector_norm(wide(difference))) / size
            if term in self._followed:
                fresh[term] = difference
        neurons = [term for term in terms if term.kind == "neuron"]
        for site in sites.of("neuron"):
            here = [t for t in neurons if t.index is not None and 0 <= t.index - site.offset < site.count]
            if here:
                fresh |= self._neurons(run, sites, site, here, size)
        if fresh:
            added = torch.cat(list(fresh.values()))
            self._names += fresh
            self._carried = added if self._carried is None else torch.cat([self._carried, added])
        self._angles(run)

    def finish(self, output: Tensor) -> Readings:
        """The readings; `output` is the last block's, (1, N, M)."""
        if self._carried is not None:
            norms = wide(self._carried).flatten(1).norm(dim=1) / torch.linalg.vector_norm(wide(output))
            self.found.frozen = dict(zip(self._names, norms.tolist(), strict=True))
        return self.found

    def _carry(self, run: BlockRun) -> None:
        """The followed terms through this block's linear part."""
        if self._carried is None:
            return
        origin = torch.zeros_like(run.input)
        base = _output(run, origin, zero_given(run, 1))
        moved = []
        for items in self._carried.split(ITEMS_AT_ONCE):
            moved.append(_output(run, items, zero_given(run, len(items))) - base)
        self._carried = torch.cat(moved)

    def _without(self, run: BlockRun, sites: BlockSites, term: TermId, given: list[Tensor]) -> Tensor:
        """The replayed block's output without one term, (1, N, M)."""
        site, place = sites.find(term)
        mask = torch.ones(site.count, device=run.input.device)
        mask[place] = 0
        edit = Removal({site: mask}).edit
        if site.kind != "expert":
            return _output(run, run.input, given, site, edit)
        # The routed unit does not run in a replay: it runs here, without the expert, from its recorded input.
        without = [
            self._unit_without(unit.module, unit.input, site, edit)[None]
            if _holds(unit.module, site)
            else unit.output[None]
            for unit in run.units
        ]
        return _output(run, run.input, without)

    def _unit_without(self, module: nn.Module, x: Tensor, site: Site, edit: Edit) -> Tensor:
        """A unit's own output with an edit in force; the rig's stand-in is bypassed because no replay is on."""
        with watching([site], edit):
            output = module(x)
        return output if isinstance(output, Tensor) else output[0]

    def _neurons(
        self, run: BlockRun, sites: BlockSites, site: Site, here: list[TermId], size: float
    ) -> dict[TermId, Tensor]:
        """local of every neuron of a layer; the terms of those that are followed."""
        ffn = replace(next(s for s in sites.of("ffn") if _holds(s.module, site)), behind=None)  # in front of a norm
        activations = self._activations(run, site)
        weight = matrix_of(site.module, site.count).to(activations)  # (I, M)
        base = self._through(run, ffn, run.input.new_zeros(1, run.input.shape[1], weight.shape[1]))
        try:
            tokens, rows = self._transfer(run, ffn, weight, base)
        except UnsupportedModelError as fault:
            self.found.reasons |= dict.fromkeys(here, str(fault))
            return {}
        # |a_k ⊗ w_k| behind the layer: sqrt(Σ_i a_ik² t_i²) |w_k D|
        norms = ((activations * tokens[:, None]).norm(dim=0) * rows / size).tolist()
        followed: dict[TermId, Tensor] = {}
        for term in here:
            assert term.index is not None
            place = term.index - site.offset
            self.found.local[term] = norms[place]
            if term in self._followed:
                outer = activations[:, place, None] * weight[place]
                followed[term] = self._through(run, ffn, outer[None].to(run.input)) - base
        return followed

    def _activations(self, run: BlockRun, site: Site) -> Tensor:
        """The neurons' activations, (N, I), from the unit's recorded input or output."""
        unit = next(u for u in run.units if u.module is site.unit)
        if not _holds(unit.module, site):  # the layer stands behind the unit
            return wide(unit.output.reshape(-1, site.count))
        seen: list[Tensor] = []

        def see(_: Site, value: Tensor, __: Tensor | None) -> None:
            seen.append(value)

        with watching([site], see):
            unit.module(unit.input)
        return wide(seen[0].reshape(-1, seen[0].shape[-1]))

    def _through(self, run: BlockRun, ffn: Site, value: Tensor) -> Tensor:
        """The frozen block's output on a zero stream with `value` as what the FFN's last layer puts out."""

        def put(_: Site, tensor: Tensor, __: Tensor | None) -> Tensor:
            return value.reshape(tensor.shape).to(tensor).clone()  # blocks may write to it

        # Attention is not silenced: what such a layer puts out in front of it goes on through its values.
        with watching([ffn], put):
            output = run.replay(torch.zeros_like(run.input), zero_given(run, 1)).output
        assert output is not None
        return output

    def _transfer(self, run: BlockRun, ffn: Site, weight: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """How the FFN's output reaches the block's: a scale a token t, (N,), and |w_k D| for every row, (I,)."""
        count, width = run.input.shape[1], weight.shape[1]
        vector = gaussian((width,), run.input, SEED)
        moved = wide(self._through(run, ffn, vector.expand(1, count, width)) - base)[0]  # (N, M): t_i (v D)
        if moved.shape[-1] == width and relative_error(moved, wide(vector).expand_as(moved)) <= 1e-6:
            return torch.ones(count, device=moved.device), weight.norm(dim=1)
        reference = moved[int(moved.norm(dim=1).argmax())]
        scale = (moved @ reference) / reference.square().sum()
        if not relative_error(scale[:, None] * reference, moved) <= tolerance_for(run.input.dtype):
            raise UnsupportedModelError("what follows the FFN is not the same for every token but for a scale")
        rows = []
        for piece in weight.split(count):
            probe = run.input.new_zeros(1, count, width)
            probe[0, : len(piece)] = piece.to(probe)
            out = wide(self._through(run, ffn, probe) - base)[0, : len(piece)]
            rows.append((out / scale[: len(piece), None]).norm(dim=1))
        return scale, torch.cat(rows)

    def _angles(self, run: BlockRun) -> None:
        cosine = torch.nn.functional.cosine_similarity(wide(run.input[0]), wide(run.output[0]), dim=-1).double()
        self.found.cosine[run.index] = float(cosine.mean())
        self.found.angle[run.index] = float((cosine.clamp(-1, 1).acos() / torch.pi).mean())


def _holds(module: nn.Module, site: Site) -> bool:
    return any(site.module is inner for inner in module.modules())


def _output(
    run: BlockRun, z: Tensor, given: list[Tensor], site: Site | None = None, edit: Edit | None = None
) -> Tensor:
    """The replayed block's output, with an edit of one site in force if given."""
    if site is None or edit is None:
        output = run.replay(z, given).output
    else:
        with watching([site], edit):
            output = run.replay(z, given).output
    assert output is not None
    return output
