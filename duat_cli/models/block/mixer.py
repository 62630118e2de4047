"""Where a token mixer without softmax has its values and its result, as discovery found and proved it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """How a tensor of a mixer holds one vector a token: (1, ..., N, ...), N at `axis`, the rest the channels."""

    axis: int
    rest: tuple[int, ...]

    def by_token(self, tensor: Tensor) -> Tensor:
        """(items, N, channels)."""
        return tensor.movedim(self.axis, 1).flatten(2) if tensor.ndim > 2 else tensor[..., None]

    def lay(self, values: Tensor) -> Tensor:
        """The inverse."""
        return values.reshape(*values.shape[:2], *self.rest).movedim(1, self.axis).contiguous()


@dataclass(frozen=True)
class MixerForm:
    """A mixer: values v (N, channels) -> its own kernel, linear in them -> gates, scales of norms -> output layer.

    Tensors are found by the number of the operation that makes them: the values' from the first, the result's from the
    last, because how many operations a kernel takes depends on the number of tokens.
    """

    module: nn.Module
    output: nn.Module | None  # the linear layer whose output is the mixer's; None: it stands behind the module
    value: tuple[int, int | None]  # number of the operation, place in what it returns
    value_layout: Layout
    result: tuple[int, int | None]  # the number counted back from the last operation
    result_layout: Layout
    width: int  # channels a head: those that the kernel treats alike
    scaled: int | None  # channels that share a norm's scale behind the kernel; None: no norm stands there
    affine: bool  # whether the values are an affine map of each token's stream alone, so that they are no UAT term
