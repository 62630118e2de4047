"""What becomes of a branch's output on its way to the residual stream: a factor, or a norm and a factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, rounding, tolerance_for, wide
from duat_cli.models.rig import BlockRun, zero_given

SEED = 17


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
    constant: Tensor  # (N, M)


def block_arrivals(run: BlockRun, output: Tensor | None, columns: Callable[[int], Tensor | None]) -> BlockArrivals:
    """The arrivals of one block.

    output: O, (heads d, M), the layer that takes the concatenated heads, if it is known; columns: for a unit call, the
    layer (n, M) that stands behind the unit and outside of it, if there is one.
    """
    attention: Arrival | str = "it has no softmax attention"
    if run.attention:
        attention = "no linear layer takes its concatenated heads"
    if run.attention and output is not None:
        attention = _or_reason(lambda: attention_arrival(run, output))
    units = tuple(_or_reason(lambda k=k: unit_arrival(run, k, columns(k))) for k in range(len(run.units)))  # type: ignore[misc]
    through, constant = passes_through(run)
    return BlockArrivals(attention, units, through, constant)


def _or_reason(work: Callable[[], Arrival]) -> Arrival | str:
    try:
        return work()
    except UnsupportedModelError as fault:
        return str(fault)


def attention_arrival(run: BlockRun, output: Tensor) -> Arrival:
    """How attention's output arrives; output: O, (heads d, M), the layer that takes the concatenated heads."""
    mixed = random_like(run.attention[0].output, SEED)
    silent = torch.zeros_like(mixed)
    direct = wide(mixed).flatten(2)[0] @ wide(output)
    return _arrival(run, zero_given(run, 3), torch.cat([silent, mixed, silent]), direct)


def unit_arrival(run: BlockRun, unit: int, columns: Tensor | None) -> Arrival:
    """How the output of that unit call arrives; columns: the layer (n, M) behind the unit, if it stands outside."""
    given = zero_given(run, 3)
    noise = random_like(run.units[unit].output, SEED)
    given[unit][1] = noise
    flat = wide(noise).reshape(-1, noise.shape[-1])
    direct = flat if columns is None else flat @ wide(columns)
    attention = torch.zeros_like(run.attention[0].output).expand(3, -1, -1, -1) if run.attention else None
    return _arrival(run, given, attention, direct)


def _arrival(run: BlockRun, given: list[Tensor], attention: Tensor | None, direct: Tensor) -> Arrival:
    """Replay nothing, the branch alone (its output is `direct`, (N, M)) and the stream alone; see where they meet."""
    zero = torch.zeros_like(run.input)
    replay = run.replay(torch.cat([zero, zero, random_like(run.input)]), given, attention=attention)
    assert replay.output is not None
    norm: nn.Module | None = None
    sent = direct
    for module, values in [*replay.points, (None, replay.output)]:
        branch, stream = _moved(values, 1), _moved(values, 2)
        if not branch:
            continue
        arrived = wide(values[1] - values[0])
        if stream:
            return Arrival(_upwards(_factor(sent, arrived, run.input.dtype), run.input.dtype), norm)
        if module not in run.parts.norms or norm is not None:
            raise UnsupportedModelError("more than a norm stands between its branch and the residual stream")
        frozen = run.recording.norms[module]
        if len(frozen) != 1:
            raise UnsupportedModelError("the norm behind its branch runs more than once")
        _factor(sent, arrived, run.input.dtype)  # a norm takes what the branch gives, not something made of it
        norm = module
        sent = wide(frozen[0](values[1:2]) - frozen[0](values[0:1]))[0]
    raise UnsupportedModelError("its branch does not reach the residual stream")


def passes_through(run: BlockRun) -> tuple[bool, Tensor]:
    """Whether a block without its branches leaves the stream as it is but for a constant, and that constant (N, M)."""
    zero, stream = torch.zeros_like(run.input), random_like(run.input)
    silent = torch.zeros_like(run.attention[0].output) if run.attention else None
    outputs = []
    for z in (zero, stream):
        output = run.replay(z, zero_given(run, 1), attention=silent).output
        assert output is not None
        outputs.append(wide(output[0]))
    constant, through = outputs[0], outputs[1] - outputs[0]
    return relative_error(through, wide(stream[0])) <= tolerance_for(run.input.dtype), constant


def _moved(values: Tensor, item: int) -> bool:
    return bool((values[item] - values[0]).abs().max() > 1e-6 * (1 + values[0].abs().max()))


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
