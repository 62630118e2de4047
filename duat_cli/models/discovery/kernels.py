"""Tests, on a few runs of a mixer's code with other values, of whether its result is a linear kernel of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from duat_cli.models.arrays import gaussian, relative_error, rounding, wide
from duat_cli.models.block.mixer import Behind
from duat_cli.models.instrument.mixer import marks

SEED = 37


def trials(own: Tensor) -> Tensor:
    """The values that a kernel is tried on, (items, N, channels), by item: zero; two random ones; their sum; its own;
    the first random ones at the first token alone; and, for each bit, those at the channels whose number has that bit
    set.

    own: the values of its own run, (1, N, channels).
    """
    one, two = (gaussian(tuple(own.shape), own, SEED + k) for k in (2, 3))
    first = torch.zeros_like(own)
    first[:, 0] = one[:, 0]
    number = torch.arange(own.shape[-1], device=own.device)
    bits = torch.arange(max(1, (own.shape[-1] - 1).bit_length()), device=own.device)
    codes = ((number[None] >> bits[:, None]) & 1)[:, None].to(own)
    return torch.cat([torch.zeros_like(own), one, two, one + two, own, first, one * codes])


def kernel_source(made: Tensor, own: Tensor) -> Tensor | None:
    """The channel of the values that each channel of the result is a kernel of, -1 for none. None where the result is
    no linear kernel of single channels that carries them from token to token; empty where it does not change.

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
    """Whether every channel of the result is made of a channel of the values, and all of these are used."""
    return torch.equal(source.unique(), torch.arange(channels, device=source.device))


def sharing(expected: Tensor, own: Tensor, far: Tensor, tolerance: float) -> int | bool | None:
    """How many channels share the scale of a norm. None where there is no norm, False where there is something else.

    own: the vectors that arrive, (1, N, channels). expected: those that would arrive if there were factors alone. far:
    the vectors that arrive for three times the input.
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


def behind_of(arrived: Callable[[Tensor], Tensor | None], like: Tensor) -> Behind | None:
    """The `Behind` between a tensor and the output layer; None where something else stands there.

    arrived: maps vectors put in place of the tensor to those that arrive at the layer, (items, N, channels) both; None
    where they do not fit. like: the tensor itself, (1, N, channels).
    """
    noise = gaussian(tuple(like.shape), like, SEED + 1)
    found = _with_centred(arrived, noise, None)
    if found is not None:
        return found
    widths = [n for n in range(2, like.shape[-1] + 1) if like.shape[-1] % n == 0]
    means = gaussian(tuple(like.shape), like, SEED + 6)
    moved = [noise + means[..., : means.shape[-1] // n].repeat_interleave(n, dim=-1) for n in widths]
    seen = arrived(torch.cat([noise, *moved]))
    centred = None if seen is None else losing(seen, widths, rounding(like.dtype))
    return None if centred is None else _with_centred(arrived, noise, centred)


def _with_centred(arrived: Callable[[Tensor], Tensor | None], noise: Tensor, centred: int | None) -> Behind | None:
    put = marks(noise, centred)
    noise = Behind(None, centred).held(noise)
    seen = arrived(torch.cat([torch.zeros_like(noise), put, noise, 3 * noise]))
    if seen is None:
        return None
    zero, marked, own, far = seen.split(1)
    if bool(zero.any()) or not bool(marked.any()):
        return None
    scaled = sharing(marked / wide(put) * wide(noise), own, far, rounding(noise.dtype))
    return None if scaled is False else Behind(scaled, centred)


def losing(arrived: Tensor, widths: Sequence[int], tolerance: float) -> int | None:
    """How many channels lose their mean together; None where none do. arrived: the vectors that arrive for noise, then,
    for each width in ascending order, for the noise with the mean of every group of so many channels moved,
    (1 + widths, N, channels)."""
    own, *moved = arrived.split(1)
    alike = (n for n, one in zip(widths, moved, strict=True) if relative_error(one, own) <= tolerance)
    return next(alike, None) if bool(own.any()) else None


def alike(H: Tensor, width: int) -> bool:
    """Whether all `width` channels of each head share one H."""
    groups = H.unflatten(0, (-1, width))
    return relative_error(groups[:, :1].expand_as(groups), groups) <= rounding(H.dtype)
