"""The branches of a block, attention and its FFNs, from their last layer to where they meet the residual stream.

A branch meets the stream behind all that is its own (its last layer, a norm on the branch, a factor) and in front of
any norm on the stream: in a pre-norm block at a later norm's input or at the block's output, in a post-norm block at
the input of the norm that ends the branch's half. What a branch adds, and what a removal takes away, is read there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError, or_reason
from duat_cli.models.arrays import gaussian, moved, random_like, relative_error, rounding, tolerance_for, wide
from duat_cli.models.instrument.hooks import giving
from duat_cli.models.instrument.records import Replay, silent_attention
from duat_cli.models.instrument.rig import BlockRun, zero_given
from duat_cli.models.terms.sites import BlockSites, Site

SEED = 17
Points = list[tuple[nn.Module | None, Tensor]]  # norms and FFN units with their inputs, (items, N, M); last the output


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
        return replay.places[self.meeting][1]

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


def block_branches(run: BlockRun, sites: BlockSites) -> dict[Site, Branch | str]:
    """Those of one block, from its run on the probe prompt."""
    ends = [*sites.of("attention"), *sites.of("ffn")]
    return {end: or_reason(functools.partial(branch_of, run, end)) for end in ends}


def branch_of(run: BlockRun, site: Site) -> Branch:
    """The branch that ends in this site: found by replays of nothing, of noise as its output, and of the stream."""
    zero = torch.zeros_like(run.input)
    silent = silent_attention(run, 1)
    sent: list[Tensor] = []

    def noise(tensor: Tensor) -> Tensor:
        drawn = gaussian(tuple(tensor.shape), tensor, SEED)
        sent.append(wide(drawn).reshape(-1, drawn.shape[-1]))
        return drawn.clone()

    def replay(z: Tensor, context: contextlib.AbstractContextManager[None]) -> Replay:
        with context:
            return run.replay(z, attention=silent)

    nothing, stream = (replay(z, silenced(site.module)) for z in (zero, random_like(run.input)))
    alone = replay(zero, giving([site.module], noise))
    # Nothing is written down in front of attention.
    if nothing.values and moved(torch.cat([nothing.values[0], alone.values[0]]), 1):
        raise UnsupportedModelError("its branch stands in front of attention, which reads it")
    each = zip(nothing.places, alone.places, stream.places, strict=True)
    points = [(three[0][0], torch.cat([values for _, values in three])) for three in each]
    found = meeting_of(run, points, sent[0])
    norm = None if found.own is None else points[found.own][0]
    return Branch(site, found.place, points[found.place][0], norm, found.own or 0)


# -- how each arrives ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """The branch reaches the stream as ±`factor` times its output, or times what `norm` makes of it."""

    factor: float
    norm: nn.Module | None


@dataclass(frozen=True)
class BlockArrivals:
    """One block call: how its branches arrive, or why that is not known; and what it does without them."""

    attention: Arrival | str
    units: tuple[Arrival | str, ...]  # in the order of the unit calls
    through: bool  # whether, without its branches, it leaves the stream as it is but for a constant
    constant: Tensor  # (N, M), what the block adds beside its branches


def block_arrivals(
    run: BlockRun,
    output: Tensor | None,
    columns: Callable[[int], Tensor | None],
    last: Sequence[nn.Module],
) -> BlockArrivals:
    """The arrivals of one block.

    output: O, (heads d, M), the layer that takes the concatenated heads, if it is known; columns: for a unit call, the
    layer (n, M) that stands behind the unit and outside of it, if there is one; last: the branches' last layers.
    """
    attention: Arrival | str = "it has no softmax attention"
    if run.attention:
        attention = "no linear layer takes its concatenated heads"
    if run.attention and output is not None:
        attention = or_reason(lambda: attention_arrival(run, output))
    units = tuple(or_reason(lambda k=k: unit_arrival(run, k, columns(k))) for k in range(len(run.units)))  # type: ignore[misc]
    norms = [a.norm for a in (attention, *units) if isinstance(a, Arrival) and a.norm is not None]
    through, constant = passes_through(run, [*last, *norms])
    return BlockArrivals(attention, units, through, constant)


def attention_arrival(run: BlockRun, output: Tensor) -> Arrival:
    """How attention's output arrives; output: O, (heads d, M), the layer that takes the concatenated heads."""
    mixed = random_like(run.attention[0].output, SEED)
    silent = torch.zeros_like(mixed)
    direct = wide(mixed).flatten(2)[0] @ wide(output)
    return _arrival(run, None, torch.cat([silent, mixed, silent]), direct)


def unit_arrival(run: BlockRun, unit: int, columns: Tensor | None) -> Arrival:
    """How the output of that unit call arrives; columns: the layer (n, M) behind the unit, if it stands outside."""
    given = zero_given(run, 3)
    noise = random_like(run.units[unit].output, SEED)
    given[unit][1] = noise
    flat = wide(noise).reshape(-1, noise.shape[-1])
    direct = flat if columns is None else flat @ wide(columns)
    return _arrival(run, given, silent_attention(run, 3), direct)


def _arrival(run: BlockRun, given: list[Tensor] | None, attention: Tensor | None, direct: Tensor) -> Arrival:
    """Replay nothing, the branch alone (its output is `direct`, (N, M)) and the stream alone; see where they meet."""
    zero = torch.zeros_like(run.input)
    points = run.replay(torch.cat([zero, zero, random_like(run.input)]), given, attention=attention).places
    met = meeting_of(run, points, direct)
    if met.read_before:
        raise UnsupportedModelError(
            "a unit behind it reads the stream through a layer of its own and reacts, so that more than the branch "
            "moves where the block ends"
        )
    norm = None if met.own is None else points[met.own][0]
    if met.own is not None:  # a norm takes what the branch gives, not something made of it
        _factor(direct, _added(points[met.own][1]), run.input.dtype)
    factor = _factor(met.sent, _added(points[met.place][1]), run.input.dtype)
    return Arrival(_upwards(factor, run.input.dtype), norm)


@dataclass(frozen=True)
class Meeting:
    """Where a branch has just been added to the stream, and the norm on the branch in front of that, as points."""

    place: int
    own: int | None
    sent: Tensor  # what the branch gives for the noise it was found with, behind its norm, (N, M)
    read_before: bool = False  # whether a norm or a unit reads the branch in front of there, through a layer of its own


def meeting_of(run: BlockRun, points: Points, sent: Tensor) -> Meeting:
    """The first point that reads the stream with the branch in it; points further on may read it through a layer.

    The items are: nothing, the branch alone (its last layer gives `sent`, (N, M)), the stream alone.
    """
    own: int | None = None
    reached = False
    for place, (module, values) in enumerate(points):
        if not moved(values, 1):
            continue
        if moved(values, 2):
            if _feature_by_feature(sent, _added(values), run.input.dtype):
                return Meeting(place, own, sent, reached)
            reached = True
        elif not reached:
            if own is not None or module not in run.parts.norms:
                raise UnsupportedModelError("more than a norm stands between its branch and the residual stream")
            own, sent = place, _behind(run, module, values)
    what = "arrive at the residual stream as it is" if reached else "reach the residual stream"
    raise UnsupportedModelError(f"its branch does not {what}")


def _behind(run: BlockRun, norm: nn.Module, values: Tensor) -> Tensor:
    """What the norm on the branch, held at its scale, makes of the branch."""
    frozen = run.recording.norms[norm]
    if len(frozen) != 1:
        raise UnsupportedModelError("the norm behind its branch runs more than once")
    return wide(frozen[0](values[1:2]) - frozen[0](values[0:1]))[0]


def _added(values: Tensor) -> Tensor:
    """What of the branch alone is there, (N, M)."""
    return wide(values[1] - values[0])


def _feature_by_feature(sent: Tensor, arrived: Tensor, dtype: torch.dtype) -> bool:
    """Whether no layer stands in between: every feature arrives times one number for all tokens."""
    if sent.shape != arrived.shape:
        return False
    factors = (sent * arrived).sum(dim=0) / sent.square().sum(dim=0).clamp_min(torch.finfo(sent.dtype).tiny)
    return relative_error(factors * sent, arrived) <= tolerance_for(dtype)


def passes_through(run: BlockRun, ends: Sequence[nn.Module]) -> tuple[bool, Tensor]:
    """Whether a block without its branches leaves the stream as it is but for a constant, and that constant (N, M).

    ends: the modules whose outputs are what the branches add, so that their biases are gone with them.
    """
    zero, stream = torch.zeros_like(run.input), random_like(run.input)
    silent = silent_attention(run, 1)
    outputs = []
    for z in (zero, stream):
        with silenced(*ends):
            outputs.append(wide(run.replay(z, attention=silent).end[0]))
    constant, through = outputs[0], outputs[1] - outputs[0]
    return relative_error(through, wide(stream[0])) <= tolerance_for(run.input.dtype), constant


def silenced(*modules: nn.Module) -> contextlib.AbstractContextManager[None]:
    """While active, these modules give zeros."""
    return giving(modules, torch.zeros_like)


def _factor(sent: Tensor, arrived: Tensor, dtype: torch.dtype) -> float:
    """The one number that makes what was sent what arrived."""
    if sent.shape != arrived.shape:
        raise UnsupportedModelError("its branch changes shape on its way to the residual stream")
    square = sent.square().sum()
    factor = float((sent * arrived).sum() / square) if float(square) > 0 else 0.0
    if not relative_error(factor * sent, arrived) <= tolerance_for(dtype):
        raise UnsupportedModelError("its branch does not arrive at the residual stream as it is")
    return factor


def _upwards(factor: float, dtype: torch.dtype) -> float:
    """A factor that was measured, in favour of a bound: not below 1 if it is 1 but for rounding."""
    near = abs(abs(factor) - 1) <= rounding(dtype)
    return max(abs(factor), 1.0) if near else abs(factor) * (1 + 1e-6)
