"""The linear layers that make a block's queries and keys, and the maps between these layers and the scores.

Rotary positions, norms of queries and keys and any reordering are linear in the layer's output, token by token, once
norms are frozen. A replay that records gradients gives that map: one gradient per channel of a head.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import gaussian, relative_error, tolerance_for, wide
from duat_cli.models.block.linears import has_matrix, stored_matrix
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.records import ReplayStop
from duat_cli.models.instrument.rig import BlockRun

SEED = 11


@dataclass(frozen=True)
class ScoreLayer:
    """The map from the input z of one linear layer to queries, or keys: q_i = D_i (W^T z_i + b), head by head."""

    read: Tensor  # z, (N, width)
    weight: Tensor  # W of each head, (heads, width, d)
    turned: Tensor  # D_i transposed, (heads, N, d, d): row a is the part of q_i due to channel a of the layer

    def at(self, token: int) -> Tensor:
        """W D_i^T, (heads, width, d): q_i is z_i times it."""
        return self.weight @ self.turned[:, token]


@torch.enable_grad()
def score_layers(run: BlockRun) -> tuple[ScoreLayer, ScoreLayer]:
    """The layer of the queries and that of the keys (by kv head). Raises UnsupportedModelError with the reason where
    there are none."""
    call = run.attention[0]
    if call.scored is None:
        raise UnsupportedModelError("its softmax is intercepted, behind the scores: queries and keys are not seen")
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    seen: list[Tensor] = []

    def leaf(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not args:
            return None
        given = output.detach().clone().requires_grad_()
        calls.append((module, args[0].detach(), given))
        return given.clone()  # some models write into it

    def asked(query: Tensor, key: Tensor) -> None:
        seen.extend((query, key))
        raise ReplayStop

    linears = [m for m in call.module.modules() if has_matrix(m) and not any(m.children()) and m not in run.parts.norms]
    with contextlib.ExitStack() as stack:
        stack.enter_context(hooked(linears, after=leaf))
        stack.enter_context(run.asking(asked))
        run.replay(run.input)
    if len(seen) != 2:
        raise UnsupportedModelError("its queries and keys are not seen in a replay")
    own = (call.scored.query, call.scored.key)
    query, key = (
        _layer(what, made, mine, calls, run) for what, made, mine in zip(("queries", "keys"), seen, own, strict=True)
    )
    return query, key


def _layer(
    what: str, made: Tensor, own: Tensor, calls: list[tuple[nn.Module, Tensor, Tensor]], run: BlockRun
) -> ScoreLayer:
    """The layer of the queries, or keys. made: (1, heads, N, d), with a graph. own: those of the model's pass."""
    if relative_error(made.detach(), own) > tolerance_for(own.dtype):
        raise UnsupportedModelError(f"its {what} are not linear in the stream while norms are held")
    outputs = [given for _, _, given in calls]
    if not made.requires_grad:
        raise UnsupportedModelError(f"no linear layer makes its {what}")
    reached = torch.autograd.grad(made.sum(), outputs, retain_graph=True, allow_unused=True)
    found = [one for one, slope in zip(calls, reached, strict=True) if slope is not None]
    if len(found) != 1:
        raise UnsupportedModelError(f"its {what} come from {len(found)} linear layers; W_QK is defined for one")
    module, read, given = found[0]
    if read.shape[:2] != run.input.shape[:2] or given.shape[:2] != read.shape[:2]:
        raise UnsupportedModelError(f"the layer of its {what} reads other vectors than the block's own tokens")
    columns = _columns(what, made, given)
    turned = _turned(made, given, columns)
    matrix = stored_matrix(module, run.input.dtype)
    layer = ScoreLayer(wide(read[0]), matrix[:, columns].permute(1, 0, 2).detach(), turned)
    _prove(what, layer, made.detach()[0], given.detach()[0], columns)
    return layer


def _columns(what: str, made: Tensor, given: Tensor) -> Tensor:
    """The output features of the layer that feed each head: (heads, d), in the layer's order."""
    heads, width = made.shape[1], made.shape[3]
    owner = torch.zeros(given.shape[-1], dtype=torch.long)
    count = torch.zeros_like(owner)
    noise = gaussian((given.shape[1], width), given, SEED)
    for head in range(heads):
        (slope,) = torch.autograd.grad((made[0, head] * noise).sum(), given, retain_graph=True)
        fed = (slope[0] != 0).any(dim=0).cpu()
        owner[fed] = head
        count += fed.long()
    if int(count.max()) > 1 or any(int(((owner == h) & (count == 1)).sum()) != width for h in range(heads)):
        raise UnsupportedModelError(f"heads of its {what} are no parts of one layer's output")
    return torch.stack([((owner == h) & (count == 1)).nonzero()[:, 0] for h in range(heads)])


def _turned(made: Tensor, given: Tensor, columns: Tensor) -> Tensor:
    """D_i transposed for every head and token, by one gradient per channel, for all heads and tokens at once."""
    heads, width = columns.shape
    turned = wide(made).new_zeros(heads, made.shape[2], width, width)
    for channel in range(width):
        (slope,) = torch.autograd.grad(made[..., channel].sum(), given, retain_graph=True)
        turned[..., channel] = wide(slope[0][:, columns.to(slope.device)].permute(1, 0, 2))
    return turned


def _prove(what: str, layer: ScoreLayer, made: Tensor, given: Tensor, columns: Tensor) -> None:
    """Checks that the layer as read gives the queries (or keys) again, with the constants of W^T z + b left in."""
    values = wide(given)[:, columns.to(given.device)].permute(1, 0, 2)  # (heads, N, d)
    again = (values[:, :, None] @ layer.turned)[:, :, 0]
    offset = values - layer.read @ layer.weight  # the bias: the same for every token
    moving = float((offset - offset[:, :1]).norm()) > tolerance_for(given.dtype) * float(values.norm())
    if moving or relative_error(again, wide(made)) > tolerance_for(made.dtype):
        raise UnsupportedModelError(f"its {what} are no linear image of what one layer gives")
