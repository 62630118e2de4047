"""Attention over windows: a block folds its tokens into a batch of windows, and attends within each of them.

Swin's windows, shifted or not (Liu et al., 2021), are such a fold. With tokens in the order of the windows H is
block-diagonal, so over the block's own tokens it is that matrix permuted, which is exact. The token at each place of
each window is found from the block's values: the block is replayed on streams with a random vector at some tokens and
zero at the others, one stream for all tokens and one for each binary digit of their numbers. If the values at a place
respond to each digit's stream either as to all tokens or not at all, the place holds the token with those digits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.models.arrays import gaussian, reached, rounding, wide

SEED = 43
CHUNK = 1 << 26  # bytes of H over all tokens made at once
LEAST = 1e-30  # least attention weight: a mask of -100 leaves 4e-44, which is lost in any sum in float64


@dataclass(frozen=True)
class Windows:
    """W windows of n places as the batch of an attention function, for one item or several."""

    count: int  # W
    at: Tensor | None = None  # the token at every place, (W, n), -1 for padding; None: not known
    sizes: tuple[int, ...] | None = None  # places of each window, where each has its own attention call; None: one call

    def inward(self, values: Tensor) -> Tensor:
        """Values (items W, kv_heads, n, d) by token, (items, kv_heads, N, d); if the tokens are not known,
        (items, W kv_heads, n, d)."""
        apart = values.unflatten(0, (-1, self.count))  # (items, W, kv_heads, n, d)
        if self.at is None:
            return apart.flatten(1, 2)
        laid_out = apart.transpose(1, 2).flatten(2, 3)
        return laid_out if self.in_order else laid_out[:, :, self.places]

    def inward_mixed(self, mixed: Tensor) -> Tensor:
        """H V (items W, n, heads, d) by token, (items, N, heads, d); if they are not known, (items, n, W heads, d)."""
        return self.inward(mixed.transpose(1, 2)).transpose(1, 2)

    def outward(self, mixed: Tensor) -> Tensor:
        """The inverse of `inward_mixed`, with zeros at places of padding."""
        if self.at is None:
            return mixed.unflatten(2, (self.count, -1)).transpose(1, 2).flatten(0, 1)
        if self.in_order:
            return mixed.unflatten(1, tuple(self.at.shape)).flatten(0, 1)
        places = mixed.new_zeros(len(mixed), self.at.numel(), *mixed.shape[2:])
        places[:, self.places] = mixed
        return places.unflatten(1, tuple(self.at.shape)).flatten(0, 1)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether every place holds the token of the same number."""
        return self.at is not None and torch.equal(self.at.flatten(), torch.arange(self.at.numel()).to(self.at))

    @functools.cached_property
    def places(self) -> Tensor:
        """The place of each token among the W n places, (N,)."""
        assert self.at is not None
        flat = self.at.flatten()
        return flat.argsort(stable=True)[int((flat < 0).sum()) :]


@dataclass(frozen=True)
class WindowRows:
    """H of windows as rows over the block's tokens."""

    weights: Tensor  # (W, heads, n, n)
    windows: Windows  # with known tokens

    @property
    def heads(self) -> int:
        return self.weights.shape[1]

    @property
    def tokens(self) -> int:
        return len(self.windows.places)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Chunks as in `RowSource`, without the columns of padding, whose values do not depend on the stream."""
        assert self.windows.at is not None
        tokens, places, size = self.tokens, self.windows.places, self.weights.shape[-1]
        step = max(1, CHUNK // (self.heads * tokens * self.weights.element_size()))
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            window, place = places[rows] // size, places[rows] % size
            own = self.weights[window, :, place].transpose(0, 1)  # (heads, rows, n)
            columns = self.windows.at[window]  # (rows, n)
            columns = torch.where(columns < 0, tokens, columns).expand(self.heads, -1, -1)
            laid = own.new_zeros(self.heads, columns.shape[1], tokens + 1).scatter_(2, columns, own)
            yield rows, laid[..., :tokens]

    def mix(self, values: Tensor) -> Tensor:
        """H V by token, (items, N, heads, d), of values in windows, (items W, kv_heads, n, d), padding included."""
        groups = self.heads // values.shape[1]
        apart = values.repeat_interleave(groups, 1).unflatten(0, (-1, self.windows.count))
        mixed = self.weights.to(values.dtype) @ apart  # (items, W, heads, n, d)
        return self.windows.inward_mixed(mixed.flatten(0, 1).transpose(1, 2))

    def allowed(self) -> Tensor:
        """Which tokens reach which through some head, (N, N) bool."""
        return reached(self.chunks())


def window_rows(weights: Tensor, at: Tensor, sizes: tuple[int, ...] | None = None) -> WindowRows:
    """The rows of H (W, heads, n, n) at tokens `at`, (W, n), with weights below `LEAST` in all heads set to zero."""
    unseen = weights.abs().amax(dim=1, keepdim=True) < LEAST
    return WindowRows(weights.masked_fill(unseen, 0.0), Windows(len(weights), at, sizes))


def laid(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of different shapes stacked to (W, …), each padded with zeros at its end."""
    padded = parts[0].new_zeros(len(parts), *map(max, zip(*(part.shape for part in parts), strict=True)))
    for window, part in zip(padded, parts, strict=True):
        window[tuple(slice(length) for length in part.shape)] = part
    return padded


def asked_streams(like: Tensor) -> Tensor:
    """The streams that tell tokens apart, (2 + digits, N, M): zero, all tokens, and those with each digit."""
    everywhere = gaussian(tuple(like.shape), like, SEED)
    tokens = like.shape[1]
    digits = torch.arange(max(1, (tokens - 1).bit_length()), device=like.device)
    held = (torch.arange(tokens, device=like.device) >> digits[:, None]) & 1  # (digits, N)
    return torch.cat([torch.zeros_like(everywhere), everywhere, everywhere * held[..., None].to(like.dtype)])


def tokens_at(answers: Tensor, tokens: int) -> Tensor | None:
    """The token at every place, (W, n), with -1 for padding; None unless each other place holds one token and each
    token has one place.

    answers: the values of `asked_streams`, (2 + digits, W, kv_heads, n, d).
    """
    places = wide(answers).transpose(2, 3).flatten(3)  # (2 + digits, W, n, kv_heads d)
    zero, moved = places[0], places[1:] - places[0]
    size = moved[0].norm(dim=-1)
    slack = rounding(answers.dtype) * (size + zero.norm(dim=-1))
    nothing, alike = moved.norm(dim=-1) <= slack, (moved - moved[0]).norm(dim=-1) <= slack
    padding = nothing[0]
    if not bool((padding | (nothing ^ alike)[1:].all(dim=0)).all()) or bool((padding & ~nothing.all(dim=0)).any()):
        return None
    digits = torch.arange(len(moved) - 1, device=answers.device)[:, None, None]
    at = torch.where(padding, -1, (alike[1:].long() << digits).sum(dim=0))
    held = at[~padding]
    whole = len(held) == tokens and torch.equal(held.sort().values, torch.arange(tokens, device=at.device))
    return at if whole else None
