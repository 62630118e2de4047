"""What a block does with other vectors while its dynamic parameters are frozen: what its values are made of, where
tokens meet beside H, and V and O by unit vectors, where no weights show them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import fit, fit_heads, gaussian, random_like, relative_error, tolerance_for, wide
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun

SEED = 7
FAR = {"float32": float("inf"), "float64": 1e-2}  # a residual that no rounding of a narrower dtype leaves
SEVERAL = "its values are made of several tokens (a shift or a convolution): V is no map of one token's stream"
UNMOVED = "its values do not depend on the stream while dynamic parameters are frozen"
BEHIND = "what its attention gives is mixed among tokens on its way to the stream (a convolution)"


def accept(error: float, dtype: torch.dtype) -> None:
    """Refuses factors that leave more than rounding."""
    if not error <= tolerance_for(dtype):
        raise UnsupportedModelError(
            "its attention is no sum of Kronecker products: factors "
            + (f"leave a relative residual of {error:.1e}" if error < float("inf") else "do not fit it")
            + wider_hint(error, dtype)
        )


def wider_hint(error: float, dtype: torch.dtype) -> str:
    """What tells whether a residual is rounding; nothing where no dtype does."""
    wider = "float32" if dtype in (torch.bfloat16, torch.float16) else "float64"
    return f"; --dtype {wider} tells whether it is rounding" if error < FAR[wider] and dtype != torch.float64 else ""


def missed(image: Tensor, own: Tensor, rounded: float) -> float:
    """How far an image of W' is from what the model's own code adds, of which `rounded` may be rounding."""
    return relative_error(image, own) if float((image - own).norm()) > rounded else 0.0


def refuse_cancelled(image: Tensor, own: Tensor, heads: Tensor, output: Tensor, dtype: torch.dtype) -> None:
    """Refuses an image of W', and what the model's own code adds, that differ by what rounding leaves of heads which
    cancel each other. heads: what O of each is multiplied by, (heads, N, d)."""
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
    """Whether values come of nonlinear units alone (a norm with a gate made of itself, say), not of the stream."""
    if not any(not unit.behind_attention for unit in run.units):
        return False
    return torch.equal(values_of(run, torch.zeros_like(run.input)), values_of(run, random_like(run.input)))


def tokens_mixed(run: BlockRun, read: Callable[[Replay], Tensor]) -> str | None:
    """Where tokens meet beside H, None where they do not: another first token moves the values of the others, or the
    first token's heads move what arrives of others'. read: what of a replay meets the stream."""
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
    """Which places behind attention move with what it gives where that is large; none where a zero scales it away (an
    output projection, a layer scale). noise: what it may give, of the shape of its output."""
    large = noise * torch.finfo(noise.dtype).max ** 0.75  # whatever a sum beside it rounds away
    zero, given = torch.zeros_like(run.input), torch.cat([torch.zeros_like(noise), large])
    replay = run.replay(torch.cat([zero, zero]), attention=given)
    return [not torch.equal(*values) for _, values in replay.places]


def probe_value(run: BlockRun) -> Tensor:
    """V row by row: unit vectors as tokens through the frozen block, up to the attention function."""
    _, tokens, width = run.input.shape
    vector = gaussian((1, 1, width), run.input, SEED + 2).expand(1, tokens, width)
    base, at_vector = (values_of(run, z) for z in (torch.zeros_like(run.input), vector))
    moved = wide(at_vector - base)  # (1, kv_heads, N, d)
    if not bool(moved.any()):
        raise UnsupportedModelError(UNMOVED)
    reference = moved[:, :, _strongest(moved[0])]
    scale = fit_heads(reference[:, :, None].expand_as(moved)[0], moved[0])[None]  # (1, kv_heads, N, 1)
    accept(relative_error(scale * reference[:, :, None], moved), run.input.dtype)
    rows = []
    for first in range(0, width, tokens):
        unit = _unit_tokens(first, tokens, width, run.input)
        rows.append((wide(values_of(run, unit) - base) / scale)[0, :, : min(tokens, width - first)])
    return torch.cat(rows, dim=1)


def _strongest(moved: Tensor) -> int:
    return int(moved.square().sum(dim=(0, 2)).argmax())


def _unit_tokens(first: int, tokens: int, width: int, like: Tensor) -> Tensor:
    """Token j holds the unit vector first + j: (1, N, width)."""
    unit = like.new_zeros(1, tokens, width)
    count = min(tokens, width - first)
    unit[0, torch.arange(count), first + torch.arange(count)] = 1.0
    return unit


def probe_output(run: BlockRun, read: Callable[[Replay], Tensor], gate: Tensor | None) -> Tensor:
    """O row by row: unit vectors behind the gate, in place of g H V, read where they meet the residual stream.

    read: what of a replay meets it.
    """
    _, tokens, heads, width = run.attention[0].output.shape
    like = run.input
    side = heads * width

    def arrival(mixed: Tensor) -> Tensor:
        shaped = mixed.reshape(1, tokens, heads, width)
        if gate is not None:
            shaped = (shaped / gate.transpose(0, 1)).to(like.dtype)
        return read(run.replay(torch.zeros_like(like), attention=shaped))[0]  # (N, M)

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
