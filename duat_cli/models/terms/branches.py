"""The branches of a block, attention and its FFNs, from their last layer to where they meet the residual stream.

A branch meets the stream behind everything of its own (its last layer, a norm on the branch, a factor) and in front of
any norm on the stream: in a pre-norm block at a later norm's input or at the block's output, in a post-norm block at
the input of the norm that ends the branch's half. At this point is read what a branch adds and a removal takes away.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import DuatError, UnsupportedModelError, or_reason
from duat_cli.models.arrays import gaussian, moved, random_like, relative_error, rounding, tolerance_for, wide
from duat_cli.models.instrument.hooks import giving
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.terms.sites import BlockSites, Site

SEED = 17
CHANGED = "its branch does not arrive at the residual stream as it is"
READ = (
    "a unit behind it reads the stream through a layer of its own and reacts, so that more than the branch moves where "
    "the block ends"
)


@dataclass(frozen=True)
class Branch:
    """Attention or one FFN of a block, from its last layer to where it meets the residual stream."""

    site: Site  # its last layer's output
    meeting: int  # number of the meeting among the points of a replay
    at: nn.Module | None  # the norm or FFN unit whose input is the meeting; None: the block's output
    norm: nn.Module | None  # the norm on the branch itself
    norm_point: int  # number of that norm's input among the points
    factor: float | str
    """The stream gets ± this number times the output of the last layer, or of `norm` behind it. Rounded up from the
    measured one; or the reason why it is not known."""

    def met(self, replay: Replay) -> Tensor:
        """The stream where the branch has just been added, (items, N, M)."""
        return replay.places[self.meeting][1]

    def in_front_of_norm(self, replay: Replay) -> Tensor:
        """The input of the branch's own norm, (items, N, M)."""
        return replay.points[self.norm_point][1]

    def name(self, names: Mapping[nn.Module, str], block: nn.Module) -> str:
        """The meeting in words, such as 'input of model.layers.0.post_attention_layernorm'."""
        return f"output of {names[block]}" if self.at is None else f"input of {names[self.at]}"


@dataclass(frozen=True)
class BlockBranches:
    """The branches of one block module, and the block's map of the stream without them."""

    found: Mapping[Site, Branch | str]
    """The branch, or the reason why it is not known, by the sites of attention and FFNs."""
    through: bool
    """Whether the block without its branches leaves the stream as it is, up to a constant."""
    adds: bool
    """Whether that constant is not zero."""

    def at(self, site: Site) -> Branch | str:
        """The branch that the terms of a site belong to, or the reason why it is not known."""
        return next(branch for end, branch in self.found.items() if site.module in set(end.module.modules()))


Branches = Mapping[nn.Module, BlockBranches]  # by block module


def ffn_term(run: BlockRun, ffn: Branch) -> Tensor:
    """The vectors that an FFN adds to the stream at its meeting, (N, M), with the biases of its last layer and norm.

    The UAT term of the sum (Eq. 11) is this without the biases, which the sum counts as static.
    """
    zero, given = torch.zeros_like(run.input), [unit.output[None] for unit in run.units]
    whole = run.silent(zero, given)
    with silenced(ffn.norm or ffn.site.module):
        without = run.silent(zero, given)
    return (ffn.met(whole) - ffn.met(without))[0]


def ffn_terms(run: BlockRun, branches: BlockBranches) -> Tensor:
    """The vectors that the block's FFNs add, all as one vector. Raises UnsupportedModelError with the reason where one
    of them is not known."""
    found = []
    for end, branch in branches.found.items():
        if end.kind == "ffn":
            if isinstance(branch, str):
                raise UnsupportedModelError(branch)
            found.append(ffn_term(run, branch).flatten())
    if not found:
        raise UnsupportedModelError("no FFN of the block could be told apart")
    return torch.cat(found)


def block_branches(run: BlockRun, sites: BlockSites) -> BlockBranches:
    """The branches of one block, from its run on the probe prompt."""
    ends = [*sites.of("attention"), *sites.of("ffn")]
    found = {end: or_reason(functools.partial(branch_of, run, end)) for end in ends}
    norms = [one.norm for one in found.values() if isinstance(one, Branch) and one.norm is not None]
    zero, stream = torch.zeros_like(run.input), random_like(run.input)
    constant, passed = (_without(run, z, *(end.module for end in ends), *norms).end for z in (zero, stream))
    through = passed.shape == stream.shape  # else it makes other tokens of them
    if through:
        error = relative_error(wide(passed) - wide(constant), wide(stream))
        through = error <= tolerance_for(run.input.dtype)
    return BlockBranches(found, through, bool(constant.any()))


def branch_of(run: BlockRun, site: Site) -> Branch:
    """The branch that ends in this site, found by three replays: of zeros, of noise as its output, and of a stream.

    It meets the stream at the first point that reads both; later points may read them through a layer.
    """
    sent: list[Tensor] = []

    def noise(tensor: Tensor) -> Tensor:
        drawn = gaussian(tuple(tensor.shape), tensor, SEED)
        sent.append(wide(drawn).reshape(-1, drawn.shape[-1]))
        return drawn.clone()

    zero, dtype = torch.zeros_like(run.input), run.input.dtype
    nothing, stream = (_without(run, z, site.module) for z in (zero, random_like(run.input)))
    with giving([site.module], noise):
        alone = run.silent(zero)
    if not sent:  # an error for the whole model, not a reason at one branch: the terms found are none of the block
        raise DuatError(
            f"{run.parts.name}: a layer that was found to end a branch ({site.kind}) does not run where the block is "
            "replayed, so its terms cannot be told apart; duat inspect and verify read this model"
        )
    # points in front of attention are not recorded, so its values are compared
    if nothing.values and moved(torch.cat([nothing.values[0], alone.values[0]]), 1):
        raise UnsupportedModelError("its branch stands in front of attention, which reads it")
    norm, norm_point = None, 0  # the norm on the branch
    arriving = sent[0]  # behind that norm
    refused: str | None = None  # why the factor is not known
    for place, three in enumerate(zip(nothing.places, alone.places, stream.places, strict=True)):
        module, values = three[0][0], torch.cat([values for _, values in three])
        if not moved(values, 1):
            continue
        added = wide(values[1] - values[0])  # the branch as it arrives at this point, (N, M)
        if moved(values, 2):
            if _feature_by_feature(arriving, added, dtype):
                return Branch(site, place, module, norm, norm_point, refused or _factor(arriving, added, dtype))
            refused = READ
        elif refused != READ:
            if norm is not None or module not in run.parts.norms:
                raise UnsupportedModelError("more than a norm stands between its branch and the residual stream")
            norm, norm_point, arriving = module, place, _behind(run, module, values)
            direct = _factor(sent[0], added, dtype)  # a norm on the branch reads a multiple of the branch's output
            refused = direct if isinstance(direct, str) else None
    raise UnsupportedModelError(CHANGED if refused == READ else "its branch does not reach the residual stream")


def _without(run: BlockRun, z: Tensor, *ends: nn.Module) -> Replay:
    """The replay of a stream in which these modules and attention give zeros."""
    with silenced(*ends):
        return run.silent(z)


def _behind(run: BlockRun, norm: nn.Module, values: Tensor) -> Tensor:
    """The branch behind the norm on it, held at its scale, (N, M)."""
    frozen = run.recording.norms[norm]
    if len(frozen) != 1:
        raise UnsupportedModelError("the norm behind its branch runs more than once")
    return wide(frozen[0](values[1:2]) - frozen[0](values[0:1]))[0]


def _feature_by_feature(sent: Tensor, arrived: Tensor, dtype: torch.dtype) -> bool:
    """Whether no layer stands in between: each feature arrives multiplied by one number, the same for all tokens."""
    if sent.shape != arrived.shape:
        return False
    factors = (sent * arrived).sum(dim=0) / sent.square().sum(dim=0).clamp_min(torch.finfo(sent.dtype).tiny)
    return relative_error(factors * sent, arrived) <= tolerance_for(dtype)


def silenced(*modules: nn.Module) -> contextlib.AbstractContextManager[None]:
    """While active, these modules give zeros."""
    return giving(modules, torch.zeros_like)


def _factor(sent: Tensor, arrived: Tensor, dtype: torch.dtype) -> float | str:
    """The absolute value of the one factor between what was sent and what arrived, or why there is none.

    It serves in upper bounds, so it is a little larger than measured, and at least 1 if it is 1 up to rounding.
    """
    if sent.shape != arrived.shape:
        return "its branch changes shape on its way to the residual stream"
    square = sent.square().sum()
    factor = float((sent * arrived).sum() / square) if float(square) > 0 else 0.0
    if not relative_error(factor * sent, arrived) <= tolerance_for(dtype):
        return CHANGED
    near = abs(abs(factor) - 1) <= rounding(dtype)
    return max(abs(factor), 1.0) if near else abs(factor) * (1 + 1e-6)
