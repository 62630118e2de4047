"""The form of a token mixer without softmax: the places of its values and its result, as discovery proved them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError


@dataclass(frozen=True)
class Layout:
    """The axes of a mixer's tensor with one vector per token: (1, ..., N, ...), where N stands at `axis` and the rest
    are channels; or (heads, ..., N, ...), with the heads folded into the batch."""

    axis: int
    rest: tuple[int, ...]
    folded: bool = False

    @classmethod
    def of(cls, tensor: Tensor, tokens: int) -> Layout:
        """The layout of a tensor of one item."""
        folded = tensor.shape[0] > 1
        whole = tensor[None] if folded else tensor
        axis = whole.shape.index(tokens, 1 + folded)
        return cls(axis, tuple(n for k, n in enumerate(whole.shape) if k not in (0, axis)), folded)

    def by_token(self, tensor: Tensor) -> Tensor:
        """The tensor as (items, N, channels)."""
        tensor = tensor.unflatten(0, (-1, self.rest[0])) if self.folded else tensor
        return tensor.movedim(self.axis, 1).flatten(2) if tensor.ndim > 2 else tensor[..., None]

    def lay(self, values: Tensor) -> Tensor:
        """The inverse of `by_token`."""
        laid = values.reshape(*values.shape[:2], *self.rest).movedim(1, self.axis)
        return (laid.flatten(0, 1) if self.folded else laid).contiguous()


@dataclass(frozen=True)
class Place:
    """One tensor among those that a call makes: the number of the operation, and the element of its result."""

    operation: int
    element: int | None  # None: it returned a tensor


@dataclass(frozen=True)
class Behind:
    """The norm, if any, between a kernel's result and the output layer, beside which there are factors of channels."""

    scaled: int | None  # number of channels that share the norm's scale; None: there is no norm
    centred: int | None = None  # number of channels whose mean the norm subtracts; None: it subtracts none

    def held(self, vectors: Tensor) -> Tensor:
        """Vectors of channels, (..., channels), without the mean that the norm subtracts.

        Subtracting it in front of the kernel or behind it is the same, because the channels that share the mean share
        an H. Values are held without it, so that only factors of channels stand behind the kernel.
        """
        if self.centred is None:
            return vectors
        parts = vectors.unflatten(-1, (-1, self.centred))
        return (parts - parts.mean(dim=-1, keepdim=True)).flatten(-2)


@dataclass(frozen=True)
class MixerForm:
    """A mixer: values v (N, channels) -> its own kernel, linear in them -> gates, scales of norms -> output layer.

    Tensors are found by the number of the operation that makes them. It is counted from the first for values and from
    the last for the result, because the number of operations of a kernel depends on the number of tokens. Several
    linear layers may make the values.
    """

    module: nn.Module
    output: nn.Module | None  # the linear layer whose output is the mixer's; None: it stands behind the module
    value: tuple[Place, ...]  # in order
    value_layout: tuple[Layout, ...]  # layout of each; their channels are concatenated
    result: Place  # its number is counted back from the last operation
    result_layout: Layout
    width: int  # channels per head, which the kernel treats alike
    behind: Behind
    affine: bool  # whether the values are an affine map of each token's stream alone, so that they are no UAT term
    once: bool = False  # whether tensors that do not depend on the values may have one item, broadcast to all
    source: Tensor | None = None  # channel of the values that each channel of the result is made of; None: its own

    def result_of(self, count: int) -> Place:
        """The place of the result in a call of `count` operations."""
        return Place(count - self.result.operation, self.result.element)

    def values(self, tensors: Sequence[Tensor]) -> Tensor:
        """The values, from the tensors that the code made, by the channels of the result: (items, N, channels)."""
        parts = [layout.by_token(tensor) for layout, tensor in zip(self.value_layout, tensors, strict=True)]
        if len({part.shape[:2] for part in parts}) > 1:
            name = type(self.module).__name__
            raise UnsupportedModelError(f"{name}: makes its values by other operations for another number of tokens")
        values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return self.behind.held(values if self.source is None else values[..., self.source.to(values.device)])

    def lay(self, values: Tensor) -> list[Tensor]:
        """The inverse of `values`, for values that are equal where several channels of the result share one."""
        if self.source is not None:
            order = self.source.argsort(stable=True)
            made = self.source[order]
            own = torch.arange(int(made[-1]) + 1, device=made.device)
            values = values[..., order[torch.searchsorted(made, own)].to(values.device)]  # the first of each
        parts = values.split([math.prod(layout.rest) for layout in self.value_layout], dim=-1)
        return [layout.lay(part) for layout, part in zip(self.value_layout, parts, strict=True)]
