"""W' of one block on one input, by its factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.attention import MadeRows, RowSource, StoredRows
from duat_cli.models.instrument.windows import WindowRows
from duat_cli.operators.kronecker import HeadFactors, KroneckerSum, channels
from duat_cli.operators.uniform import uniform_rows

CHANNEL_ELEMENTS = 1 << 26  # most elements of the attention matrices of single channels


def one_stream(operator: AttentionOperator, why: str) -> AttentionOperator:
    """The operator itself. Raises UnsupportedModelError with that reason where a token has several streams."""
    if operator.streams:
        raise UnsupportedModelError(why)
    return operator


def whole_rows(source: RowSource) -> Tensor:
    """All of H at once, (heads, N, N), without a copy where it is stored whole."""
    chunks = [weights for _, weights in source.chunks()]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)


def gated_rows(rows: RowSource, gate: Tensor | None) -> tuple[RowSource, Tensor | None, Tensor | None]:
    """H, the gate (heads, N, d) and the gate of whole heads, (heads, N), each None if there is none. A gate that is the
    same for all channels of a head becomes part of H."""
    if gate is not None and torch.equal(gate, gate[..., :1].expand_as(gate)):
        return scaled_rows(rows, gate[..., 0]), None, gate[..., 0]
    return rows, gate, None


def scaled_rows(rows: RowSource, factor: Tensor) -> RowSource:
    """H with its rows multiplied by a factor, (heads, N)."""
    return MadeRows(rows, rows.heads, lambda some, H: H.to(factor.dtype) * factor[:, some, None])


@dataclass(frozen=True)
class PromptOperators:
    """W' of every prompt of a batch; fields as in `AttentionOperator`."""

    attention: Tensor  # t H, (prompts, heads, N, N)
    source_scale: Tensor  # s, (prompts, heads, N)
    token_scale: Tensor  # t, (prompts, N) or (prompts, 1)
    values: Tensor  # (prompts, heads, N, d)
    allowed: Tensor | None  # the same for all, (N, N)


@dataclass(frozen=True)
class AttentionOperator:
    """W' of one block on one input."""

    rows: RowSource
    source_scale: Tensor  # s, (heads, N)
    token_scale: Tensor  # t, (N,) or (1,)
    values: Tensor  # the values without bias at the block's input, scale included: (heads, N, d)
    factors: HeadFactors
    error: float  # largest relative residual of the fits
    each: tuple[float, ...] = ()  # largest relative residual of each prompt of a batch
    allowed: Tensor | None = None  # positions that the attention mask leaves, (N, N) bool; None: no mask was seen
    own: bool = False  # whether it reads a mixer's own values, a UAT term, in place of the stream
    gate: Tensor | None = None  # factor of each channel of H V by token, (heads, N, d); None: ones
    offsets: tuple[int, ...] = (0,)  # how far behind their tokens values stand; every head stands once per offset
    head_gate: Tensor | None = None  # factor of all channels of a head by token, part of `rows`: (heads, N); None: ones
    ungated: RowSource | None = None  # `rows` without `head_gate`; None where there is no such gate
    read: Tensor | None = None  # weights of the streams that V reads, (N, streams); None: one stream a token
    reached: Tensor | None = None  # weights of the streams that O reaches, (N, streams), as in streams.py

    @property
    def streams(self) -> bool:
        """Whether a token has several streams, which W' reads or reaches by their unit weights."""
        return self.read is not None or self.reached is not None

    @property
    def products(self) -> int:
        """How many Kronecker products W' is a sum of: one per head (and offset). With a gate, one per head and channel
        or one per head and token, whichever are fewer."""
        return self.factors.heads * (1 if self.gate is None else min(self.gate.shape[1:]))

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, Ĥ[:, rows, :])."""
        for rows, weights in self.attention_chunks():
            yield rows, weights * self.source_scale[:, None, :]

    def attention_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, t H[:, rows, :]), for products with `values`, which include s."""
        scale, alike = self.token_scale, self.token_scale.numel() == 1
        plain = alike and float(scale) == 1.0
        for rows, attention in self.rows.chunks():
            weights = attention.to(scale.dtype)
            yield rows, weights if plain else weights * (scale if alike else scale[rows, None])

    def image(self) -> Tensor:
        """W' applied to the vectors that `values` are made of, (N, M)."""
        mixed = torch.cat([weights @ self.values for _, weights in self.attention_chunks()], dim=1)  # (heads, N, d)
        return torch.einsum("hnd,hdm->nm", mixed if self.gate is None else mixed * self.gate, self.factors.output)

    def matrix(self) -> KroneckerSum:
        """W' with all of Ĥ at once."""
        return KroneckerSum(torch.cat([chunk for _, chunk in self.chunks()], dim=1), self.factors, self.gate)

    def by_prompt(self) -> PromptOperators:
        """W' of each prompt of a batch, with all of H. Raises UnsupportedModelError for another kind of attention."""
        count = len(self.each)
        if not isinstance(self.rows, WindowRows) or self.rows.windows.count != count:
            raise UnsupportedModelError("its rows of H are not those of prompts behind each other")
        if self.gate is not None or self.own or self.streams:
            raise UnsupportedModelError("its operator is not that of plain attention")
        scale = self.token_scale.reshape(count, -1) if len(self.token_scale) > 1 else self.token_scale.expand(count, 1)
        attention = self.rows.weights.to(scale.dtype)
        return PromptOperators(
            attention=attention if bool((scale == 1).all()) else attention * scale[:, None, :, None],
            source_scale=self.source_scale.unflatten(1, (count, -1)).transpose(0, 1),
            token_scale=scale,
            values=self.values.unflatten(1, (count, -1)).transpose(0, 1),
            allowed=self.allowed,
        )

    def uniform(self, seen: Tensor) -> AttentionOperator:
        """W' with every H uniform over the tokens that each row may see, (N, N) bool; a gate stays."""
        rows: RowSource = StoredRows(uniform_rows(seen, self.factors.heads, self.values.dtype, self.offsets))
        even = replace(self, rows=rows, allowed=seen if self.offsets == (0,) else None, offsets=(0,))
        return even if self.head_gate is None else replace(even, rows=scaled_rows(rows, self.head_gate), ungated=rows)

    def by_channel(self) -> AttentionOperator:
        """This W' without a gate: one head of width 1 for every channel, with g H in place of H.

        Raises UnsupportedModelError where their attention matrices would not fit in memory.
        """
        if self.gate is None:
            return self
        heads, tokens, width = self.gate.shape
        if heads * width * tokens**2 > CHANNEL_ELEMENTS:
            raise UnsupportedModelError(
                f"a gate inside its attention makes one operator of each of {heads * width} channels; with {tokens} "
                f"tokens they take more than {CHANNEL_ELEMENTS >> 18} MiB; use --max-tokens"
            )
        rows = whole_rows(self.rows).to(self.gate.dtype)
        left = (rows[:, None] * self.gate.transpose(1, 2)[..., None]).flatten(0, 1)  # (heads d, N, N)
        return replace(
            self,
            rows=StoredRows(left),
            source_scale=self.source_scale.repeat_interleave(width, 0),
            values=self.values.transpose(1, 2).flatten(0, 1)[..., None],
            factors=channels(self.factors),
            gate=None,
            offsets=(0,),
        )
