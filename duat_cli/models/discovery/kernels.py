"""What shows, of a few runs of a mixer's code on other values, whether its result is a linear kernel of them."""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.models.arrays import gaussian, relative_error, rounding

SEED = 37


def trials(own: Tensor) -> Tensor:
    """The values that a kernel is tried on, (items, N, channels), of its own, (1, N, channels): none, two at random,
    their sum, its own, one token alone, and the first with the channels of which a bit of the number is set."""
    one, two = (gaussian(tuple(own.shape), own, SEED + k) for k in (2, 3))
    first = torch.zeros_like(own)
    first[:, 0] = one[:, 0]
    number = torch.arange(own.shape[-1], device=own.device)
    bits = torch.arange(max(1, (own.shape[-1] - 1).bit_length()), device=own.device)
    codes = ((number[None] >> bits[:, None]) & 1)[:, None].to(own)
    return torch.cat([torch.zeros_like(own), one, two, one + two, own, first, one * codes])


def kernel_source(made: Tensor, own: Tensor) -> Tensor | None:
    """The channel of the values that each channel of the result is made of, -1 for none; None where what moves is no
    linear kernel of single channels that carries them from token to token, empty where nothing moves.

    made: the results of `trials`, (items, N, channels); own: the result of the mixer's own values, (1, N, channels).
    """
    zero, one, two, both, again, first, *coded = made
    tolerance = rounding(made.dtype)
    moved = (one - zero).abs().amax(dim=0) > tolerance * torch.maximum(one.abs(), zero.abs()).amax(dim=0)
    if not bool(moved.any()):
        return moved.new_empty(0, dtype=torch.long)
    zero, one, two, both, first = (result[:, moved] for result in (zero, one, two, both, first))
    linear = relative_error(one + two, both) <= tolerance and relative_error(again, own[0]) <= tolerance
    mixes = float(first[1:].abs().max()) > 1e-6 * float(one.abs().max())
    if bool(zero.any()) or not (linear and mixes):
        return None
    half = one.square().sum(dim=0) / 2
    seen = torch.stack([(part[:, moved] * one).sum(dim=0) > half for part in coded])  # (bits, channels that move)
    if not all(relative_error(one * bit, part[:, moved]) <= tolerance for bit, part in zip(seen, coded, strict=True)):
        return None
    source = torch.full(moved.shape, -1, device=moved.device)
    source[moved] = (seen.long() << torch.arange(len(seen), device=seen.device)[:, None]).sum(dim=0)
    return source


def is_whole(source: Tensor, channels: int) -> bool:
    """Whether every channel of the result is made of one of the values', and every one of theirs is in it."""
    return torch.equal(source.unique(), torch.arange(channels, device=source.device))


def sharing(expected: Tensor, own: Tensor, far: Tensor, tolerance: float) -> int | bool | None:
    """How many channels share a norm's scale, None where no norm stands there, False where something else does.

    own: what arrives, (1, N, channels), against what factors alone give; far: the same at three times the vectors.
    """
    if relative_error(expected, own) <= tolerance:
        return None
    if relative_error(far, own) <= 1e-3 + tolerance:  # a norm's eps leaves a little of the scale
        for width in (n for n in range(own.shape[-1], 1, -1) if own.shape[-1] % n == 0):
            mine, its = (t.unflatten(-1, (-1, width)) for t in (expected, own))
            scale = (mine * its).sum(-1, keepdim=True) / mine.square().sum(-1, keepdim=True)
            if relative_error(scale * mine, its) <= tolerance:
                return width
    return False


def alike(H: Tensor, width: int) -> bool:
    """Whether the channels of a head share one H."""
    groups = H.unflatten(0, (-1, width))
    return relative_error(groups[:, :1].expand_as(groups), groups) <= rounding(H.dtype)
