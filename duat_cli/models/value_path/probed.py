"""Probes of a block whose dynamic parameters are frozen: what its values depend on, whether tokens are mixed outside H,
the factors of the channels of H V, and V and O by unit vectors, where they cannot be read from weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import (
    fit,
    fit_heads,
    gaussian,
    random_like,
    random_signs,
    relative_error,
    tolerance_for,
    wide,
)
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun

SEED = 7
GATE_SEED = 29
FAR = {"float32": float("inf"), "float64": 1e-2}  # beyond it no narrower dtype rounds; float16 may overflow
SEVERAL = "its values are made of several tokens (a shift or a convolution): V is no map of one token's stream"
UNMOVED = "its values do not depend on the stream while dynamic parameters are frozen"
BEHIND = "what its attention gives is mixed among tokens on its way to the stream (a convolution)"


def accept(error: float, dtype: torch.dtype) -> None:
    """Refuses factors with an error above the tolerance for rounding."""
    if not error <= tolerance_for(dtype):
        raise UnsupportedModelError(
            "its attention is no sum of Kronecker products: factors "
            + (f"leave a relative residual of {error:.1e}" if error < float("inf") else "do not fit it")
            + wider_hint(error, dtype)
        )


def wider_hint(error: float, dtype: torch.dtype) -> str:
    """The end of an error text: the wider dtype that tells whether the residual is rounding; empty if none does."""
    wider = "float32" if dtype in (torch.bfloat16, torch.float16) else "float64"
    return f"; --dtype {wider} tells whether it is rounding" if error <= FAR[wider] and dtype != torch.float64 else ""


def missed(image: Tensor, own: Tensor, rounded: float) -> float:
    """The relative error of an image of W' against that of the model's own code; 0 for a difference up to `rounded`."""
    return relative_error(image, own) if float((image - own).norm()) > rounded else 0.0


def refuse_cancelled(image: Tensor, own: Tensor, heads: Tensor, output: Tensor, dtype: torch.dtype) -> None:
    """Refuses an image of W' that differs from that of the model's own code only by rounding, because heads cancel each
    other. heads: the vectors that O of each head multiplies, (heads, N, d)."""
    squares = sum(float((each @ to).square().sum()) for each, to in zip(heads, output, strict=True))
    rounded = 4 * torch.finfo(dtype).eps * squares**0.5
    if float((image - own).norm()) > rounded:
        return
    if float(own.norm()) <= rounded:
        raise UnsupportedModelError("W' is zero but for rounding: its heads cancel each other")
    error = relative_error(image, own)
    raise UnsupportedModelError(
        "its heads all but cancel each other, and rounding hides what is left: relative residual "
        f"{error:.1e}{wider_hint(0.0, dtype)}"
    )


def values_of(run: BlockRun, z: Tensor) -> Tensor:
    """The values of the frozen block on `z` (1, N, M): (1, kv_heads, N, d)."""
    return run.replay(z, stop_at_values=True).values[0]


def made_by_units(run: BlockRun) -> bool:
    """Whether values come only from nonlinear units (a norm with a gate made of itself, say), not from the stream."""
    if not any(not unit.behind_attention for unit in run.units):
        return False
    return torch.equal(values_of(run, torch.zeros_like(run.input)), values_of(run, random_like(run.input)))


def tokens_mixed(run: BlockRun, read: Callable[[Replay], Tensor]) -> str | None:
    """The text on where tokens are mixed outside H; None where they are not. Either a change of the first token moves
    the values of others, or a change of its heads moves the vectors of others that arrive. read: those vectors of a
    replay."""
    zero = torch.zeros_like(run.input)
    changed = zero.clone()
    changed[:, 0] = random_like(zero)[:, 0]
    if not torch.equal(values_of(run, zero)[:, :, 1:], values_of(run, changed)[:, :, 1:]):
        return SEVERAL
    silent = torch.zeros_like(run.attention[0].output)
    first = silent.clone()
    first[:, 0] = random_like(silent)[:, 0]
    base, moved = (read(run.replay(zero, attention=heads)) for heads in (silent, first))
    return None if torch.equal(base[:, 1:], moved[:, 1:]) else BEHIND


def reached_by_large(run: BlockRun, noise: Tensor) -> list[bool]:
    """Which places behind attention change with a large output of it; none where a factor of zero removes it (an output
    projection, a layer scale). noise: an output of attention, in its shape."""
    large = noise * torch.finfo(noise.dtype).max ** 0.75  # so large that no sum rounds it away
    zero, given = torch.zeros_like(run.input), torch.cat([torch.zeros_like(noise), large])
    replay = run.replay(torch.cat([zero, zero]), attention=given)
    return [not torch.equal(*values) for _, values in replay.places]


def gate_of(run: BlockRun, given: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The factors of the channels of attention's result in front of the output projection (gates and norms on heads),
    (heads, N, d), and their relative error. Raises UnsupportedModelError where that result is not multiplied channel
    by channel.

    Random signs in place of H V arrive at the output projection times the factor of every channel. A second, random
    vector must arrive multiplied by the same factors, which is the proof. given: as in `BlockRun.replay`; the first
    item is used.
    """
    projection = run.parts.output_projection
    if projection is None:
        raise UnsupportedModelError("no linear layer takes its concatenated heads")
    like = run.attention[0].output  # (1, N, heads, d)
    noise = gaussian(tuple(like.shape), like, GATE_SEED)
    signs = random_signs(like, GATE_SEED + 1)
    arrived = [wide(_arriving(run, projection.linear, given, z)) for z in (torch.zeros_like(like), signs, noise)]
    gate = (arrived[1] - arrived[0]) * wide(signs)
    error = relative_error(gate * wide(noise), arrived[2] - arrived[0])
    if not bool(gate.any()) or not error <= tolerance_for(like.dtype):
        raise UnsupportedModelError(
            f"what stands between its heads and the output projection is no gate on channels (residual {error:.1e})"
        )
    return gate[0].transpose(0, 1).contiguous(), error


def _arriving(run: BlockRun, linear: nn.Module, given: Sequence[Tensor], attention: Tensor) -> Tensor:
    """The input of the output projection for this result of attention, in the shape of the result."""
    seen: list[Tensor] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0].detach().clone())

    with hooked([linear], see):
        run.replay(torch.zeros_like(run.input), [g[:1] for g in given], attention=attention)
    if len(seen) != 1 or seen[0].numel() != attention.numel():
        raise UnsupportedModelError("the layer that takes its heads is not called once with them")
    return seen[0].reshape(attention.shape)


def probe_value(run: BlockRun) -> Tensor:
    """V row by row, from unit vectors as tokens that go through the frozen block up to the attention function. Where a
    token has several streams, each is given the same vector."""
    streams = run.parts.streams
    tokens, width = run.input.shape[1], run.input.shape[2] // streams
    vector = gaussian((1, 1, width), run.input, SEED + 2).expand(1, tokens, width).repeat(1, 1, streams)
    base, at_vector = (values_of(run, z) for z in (torch.zeros_like(run.input), vector))
    moved = wide(at_vector - base)  # (1, kv_heads, N, d)
    if not bool(moved.any()):
        raise UnsupportedModelError(UNMOVED)
    reference = moved[:, :, _strongest(moved[0])]
    scale = fit_heads(reference[:, :, None].expand_as(moved)[0], moved[0])[None]  # (1, kv_heads, N, 1)
    accept(relative_error(scale * reference[:, :, None], moved), run.input.dtype)
    rows = []
    for first in range(0, width, tokens):
        unit = _unit_tokens(first, tokens, width, run.input).repeat(1, 1, streams)
        rows.append((wide(values_of(run, unit) - base) / scale)[0, :, : min(tokens, width - first)])
    return torch.cat(rows, dim=1)


def _strongest(moved: Tensor) -> int:
    return int(moved.square().sum(dim=(0, 2)).argmax())


def _unit_tokens(first: int, tokens: int, width: int, like: Tensor) -> Tensor:
    """Tokens of which number j is the unit vector of index first + j: (1, N, width)."""
    unit = like.new_zeros(1, tokens, width)
    count = min(tokens, width - first)
    unit[0, torch.arange(count), first + torch.arange(count)] = 1.0
    return unit


def probe_output(run: BlockRun, read: Callable[[Replay], Tensor], gate: Tensor | None) -> Tensor:
    """O row by row, from unit vectors behind the gate, in place of g H V, read where they meet the residual stream; the
    sum over the streams where a token has several.

    read: the vectors of a replay that meet it.
    """
    _, tokens, heads, width = run.attention[0].output.shape
    like = run.input
    side = heads * width

    def arrival(mixed: Tensor) -> Tensor:
        shaped = mixed.reshape(1, tokens, heads, width)
        if gate is not None:
            shaped = (shaped / gate.transpose(0, 1)).to(like.dtype)
        met = read(run.replay(torch.zeros_like(like), attention=shaped))[0].to(like.dtype)  # (N, M)
        streams = met.shape[1] * run.parts.streams // like.shape[2] if run.parts.streams > 1 else 1  # or one alone
        return met.unflatten(1, (streams, -1)).sum(dim=1)

    base = arrival(like.new_zeros(1, tokens, side))
    moved = arrival(gaussian((1, 1, side), like, SEED + 3).expand(1, tokens, side)) - base
    moved = wide(moved)
    reference = moved[_strongest(moved[None])]
    scale = fit(reference.expand_as(moved), moved)  # (N, 1)
    accept(relative_error(scale * reference, moved), like.dtype)
    rows = []
    for first in range(0, side, tokens):
        unit = _unit_tokens(first, tokens, side, like)
        rows.append((wide(arrival(unit) - base) / scale)[: min(tokens, side - first)])
    return torch.cat(rows).reshape(heads, width, -1)
