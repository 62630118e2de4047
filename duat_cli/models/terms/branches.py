"""The branches of a block, attention and FFNs, from their last layer to where they meet the residual stream.

What a branch adds, and what a removal takes away, is read at that place: behind the branch's own last layer, norm and
factor, and in front of any norm on the stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError, or_reason
from duat_cli.models.arrays import gaussian, moved, random_like, wide
from duat_cli.models.discovery.structure import DISCOVERY_TOKENS, ModelStructure, probe_ids, run_stack
from duat_cli.models.instrument.records import Replay, silent_attention
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.terms.arrival import SEED, meeting_of, points_of, silenced
from duat_cli.models.terms.sites import BlockSites, Site, watching


@dataclass(frozen=True)
class Branch:
    """Attention or one FFN of a block, from its last layer to where it meets the residual stream."""

    site: Site  # its last layer's output
    meeting: int  # place among the points of a replay
    at: nn.Module | None  # the norm or FFN unit whose input that is; None: the block's output
    norm: nn.Module | None = None  # on the branch itself
    norm_point: int = 0  # its place among the points

    def met(self, replay: Replay) -> Tensor:
        """The stream where the branch has just been added, (items, N, M)."""
        return points_of(replay)[self.meeting][1]

    def in_front_of_norm(self, replay: Replay) -> Tensor:
        """What the branch's own norm reads, (items, N, M)."""
        return replay.points[self.norm_point][1]

    def name(self, names: Mapping[nn.Module, str], block: nn.Module) -> str:
        """The meeting in words, such as 'input of model.layers.0.post_attention_layernorm'."""
        return f"output of {names[block]}" if self.at is None else f"input of {names[self.at]}"


Branches = Mapping[nn.Module, Mapping[Site, Branch | str]]  # by block module, of its attention and FFN sites


def branch_at(branches: Mapping[Site, Branch | str], site: Site) -> Branch | str:
    """The branch of a block that the terms of a site are part of, or why it is not known."""
    return next(branch for end, branch in branches.items() if site.module in set(end.module.modules()))


def ffn_term(run: BlockRun, ffn: Branch) -> Tensor:
    """What an FFN adds to the stream where they meet, (N, M): its last layer's bias and its norm's are part of it.

    The UAT term of the sum (Eq. 11) is this without the biases, which the sum counts as static.
    """
    zero, given = torch.zeros_like(run.input), [unit.output[None] for unit in run.units]
    silent = silent_attention(run, 1)
    whole = run.replay(zero, given, attention=silent)
    with silenced(ffn.norm or ffn.site.module):
        without = run.replay(zero, given, attention=silent)
    return (ffn.met(whole) - ffn.met(without))[0]


def ffn_terms(run: BlockRun, branches: Mapping[Site, Branch | str]) -> Tensor:
    """What the block's FFNs add, all as one vector; UnsupportedModelError says why one of them is not known."""
    found = []
    for end, branch in branches.items():
        if end.kind == "ffn":
            if isinstance(branch, str):
                raise UnsupportedModelError(branch)
            found.append(ffn_term(run, branch).flatten())
    if not found:
        raise UnsupportedModelError("no FFN of the block could be told apart")
    return torch.cat(found)


def find_branches(structure: ModelStructure, sites: Mapping[nn.Module, BlockSites]) -> Branches:
    """The branch of every attention and FFN site, or why it is not known; from one short run."""
    found: dict[nn.Module, dict[Site, Branch | str]] = {}

    def listen(run: BlockRun) -> None:
        module = run.parts.module
        if module not in found:
            found[module] = block_branches(run, sites[module])

    ids = probe_ids(structure.stack, DISCOVERY_TOKENS)
    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    return found


def block_branches(run: BlockRun, sites: BlockSites) -> dict[Site, Branch | str]:
    """Those of one block, from its run on the probe prompt."""
    ends = [*sites.of("attention"), *sites.of("ffn")]
    return {end: or_reason(functools.partial(branch_of, run, end)) for end in ends}


def branch_of(run: BlockRun, site: Site) -> Branch:
    """The branch that ends in this site: found by replays of nothing, of noise as its output, and of the stream."""
    zero = torch.zeros_like(run.input)
    silent = silent_attention(run, 1)
    sent: list[Tensor] = []

    def noise(_: Site, tensor: Tensor, __: Tensor | None) -> Tensor:
        drawn = gaussian(tuple(tensor.shape), tensor, SEED)
        sent.append(wide(drawn).reshape(-1, drawn.shape[-1]))
        return drawn.clone()

    def replay(z: Tensor, context: contextlib.AbstractContextManager[None]) -> Replay:
        with context:
            return run.replay(z, attention=silent)

    nothing, stream = (replay(z, silenced(site.module)) for z in (zero, random_like(run.input)))
    alone = replay(zero, watching([Site(site.kind, site.module, "output", 1)], noise))
    # Nothing is written down in front of attention.
    if nothing.values and moved(torch.cat([nothing.values[0], alone.values[0]]), 1):
        raise UnsupportedModelError("its branch stands in front of attention, which reads it")
    each = zip(*map(points_of, (nothing, alone, stream)), strict=True)
    points = [(three[0][0], torch.cat([values for _, values in three])) for three in each]
    found = meeting_of(run, points, sent[0])
    norm = None if found.own is None else points[found.own][0]
    return Branch(site, found.place, points[found.place][0], norm, found.own or 0)
