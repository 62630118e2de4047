"""Gates and norms on heads: the factors of the channels of attention's result in front of the output projection.

They are measured: random signs in place of H V go through the frozen block and arrive at the output projection times
the factor of every channel. A second, random vector must arrive multiplied by the same factors, which is the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import gaussian, random_signs, relative_error, tolerance_for, wide
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.rig import BlockRun

SEED = 29


def gate_of(run: BlockRun, given: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The factors, (heads, N, d), and their relative error. Raises UnsupportedModelError where attention's result is
    not multiplied channel by channel.

    given: as in `BlockRun.replay`; the first item is used.
    """
    projection = run.parts.output_projection
    if projection is None:
        raise UnsupportedModelError("no linear layer takes its concatenated heads")
    like = run.attention[0].output  # (1, N, heads, d)
    noise = gaussian(tuple(like.shape), like, SEED)
    signs = random_signs(like, SEED + 1)
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
