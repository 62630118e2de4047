"""Where a token mixer without softmax has its values and its result, as discovery found and proved it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError


@dataclass(frozen=True)
class Layout:
    """How a tensor of a mixer holds one vector a token: (1, ..., N, ...), N at `axis`, the rest the channels; or with
    the heads folded into the batch, (heads, ..., N, ...)."""

    axis: int
    rest: tuple[int, ...]
    folded: bool = False

    @classmethod
    def of(cls, tensor: Tensor, tokens: int) -> Layout:
        """Of a tensor of one item."""
        folded = tensor.shape[0] > 1
        whole = tensor[None] if folded else tensor
        axis = whole.shape.index(tokens, 1 + folded)
        return cls(axis, tuple(n for k, n in enumerate(whole.shape) if k not in (0, axis)), folded)

    def by_token(self, tensor: Tensor) -> Tensor:
        """(items, N, channels)."""
        tensor = tensor.unflatten(0, (-1, self.rest[0])) if self.folded else tensor
        return tensor.movedim(self.axis, 1).flatten(2) if tensor.ndim > 2 else tensor[..., None]

    def lay(self, values: Tensor) -> Tensor:
        """The inverse."""
        laid = values.reshape(*values.shape[:2], *self.rest).movedim(1, self.axis)
        return (laid.flatten(0, 1) if self.folded else laid).contiguous()


@dataclass(frozen=True)
class Place:
    """One tensor among those that a call makes: the number of the operation, and the place in what it returned."""

    operation: int
    element: int | None  # None: it returned a tensor


@dataclass(frozen=True)
class Behind:
    """What stands between a kernel's result and the output layer beside factors of channels."""

    scaled: int | None  # channels that share a norm's scale; None: no norm stands there
    centred: int | None = None  # channels whose mean that norm takes away; None: it takes none away

    def held(self, vectors: Tensor) -> Tensor:
        """Vectors of channels, (..., channels), without that mean.

        It is the same in front of the kernel as behind it, because the channels that share it share an H: the values
        are held without it, so that factors of channels are all that stands behind.
        """
        if self.centred is None:
            return vectors
        parts = vectors.unflatten(-1, (-1, self.centred))
        return (parts - parts.mean(dim=-1, keepdim=True)).flatten(-2)


@dataclass(frozen=True)
class MixerForm:
    """A mixer: values v (N, channels) -> its own kernel, linear in them -> gates, scales of norms -> output layer.

    Tensors are found by the number of the operation that makes them: the values' from the first, the result's from the
    last, because how many operations a kernel takes depends on the number of tokens. Several linear layers may make the
    values.
    """

    module: nn.Module
    output: nn.Module | None  # the linear layer whose output is the mixer's; None: it stands behind the module
    value: tuple[Place, ...]  # in order
    value_layout: tuple[Layout, ...]  # of each; their channels stand one behind the other
    result: Place  # the number counted back from the last operation
    result_layout: Layout
    width: int  # channels a head: those that the kernel treats alike
    behind: Behind
    affine: bool  # whether the values are an affine map of each token's stream alone, so that they are no UAT term
    once: bool = False  # whether what other values leave as it is may be computed for one item and broadcast to all
    source: Tensor | None = None  # the value's channel that each of the result's is made of; None: its own

    def result_of(self, count: int) -> Place:
        """Where its result is made in a call of so many operations."""
        return Place(count - self.result.operation, self.result.element)

    def values(self, tensors: Sequence[Tensor]) -> Tensor:
        """The values, as the code made them, by the channels of the result: (items, N, channels)."""
        parts = [layout.by_token(tensor) for layout, tensor in zip(self.value_layout, tensors, strict=True)]
        if len({part.shape[:2] for part in parts}) > 1:
            name = type(self.module).__name__
            raise UnsupportedModelError(f"{name}: makes its values by other operations for another number of tokens")
        values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return self.behind.held(values if self.source is None else values[..., self.source.to(values.device)])

    def lay(self, values: Tensor) -> list[Tensor]:
        """The inverse, for values that agree where channels share one."""
        if self.source is not None:
            order = self.source.argsort(stable=True)
            made = self.source[order]
            own = torch.arange(int(made[-1]) + 1, device=made.device)
            values = values[..., order[torch.searchsorted(made, own)].to(values.device)]  # the first of each
        parts = values.split([math.prod(layout.rest) for layout in self.value_layout], dim=-1)
        return [layout.lay(part) for layout, part in zip(self.value_layout, parts, strict=True)]
