"""The dynamic parameters of one block under one input, with the names that files hold them under.

    H              (heads, N, N)   attention weights; row i is what token i reads. H.k where the block calls attention
                                   several times, k from 0
    S.NORM         (N,)            scale of the norm with that module name; (N, heads) or (heads, N) if it runs by head
    gain.NORM      (M,)            gain of the norm: NORM(x) = S (P x) gain + offset, with P the identity or the removal
                                   of the mean, and offset the norm's own bias

A norm that runs several times in a block has .k behind its name.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from duat_cli.models.block.norms import FrozenNorm
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.instrument.attention import RowSource
from duat_cli.models.instrument.rig import BlockRun


def attention_weights(run: BlockRun) -> Iterator[tuple[str, RowSource]]:
    """Every H of the block, with its name."""
    calls = run.attention
    for number, call in enumerate(calls):
        yield "H" if len(calls) == 1 else f"H.{number}", call.rows


def norm_scales(run: BlockRun) -> Iterator[tuple[str, Tensor]]:
    """Scale and gain of every norm of the block, with their names."""
    names = {module: name for name, module in run.parts.module.named_modules()}
    for norm, frozen in run.recording.norms.items():
        for number, one in enumerate(frozen):
            name = names[norm] if len(frozen) == 1 else f"{names[norm]}.{number}"
            yield f"S.{name}", _scale(one)
            yield f"gain.{name}", one.form.gain.reshape(-1) if one.form.gain.numel() else one.form.gain


def _scale(norm: FrozenNorm) -> Tensor:
    """Scale of a norm, without the batch axis of size one, and without that of groups of channels where it has one."""
    scale = norm.scale[..., 0] if norm.form.groups == 1 else norm.scale
    return scale[0] if scale.ndim > 1 else scale


def dynamic_names(parts: BlockParts) -> Iterator[str]:
    """The longest names that a block's H and scales can have in a file, to leave room for its header."""
    yield from (f"H.{number}" for number in range(max(len(parts.attention), 1)))
    names = {module: name for name, module in parts.module.named_modules()}
    for norm in parts.norms:
        yield from (f"{kind}.{names[norm]}.0" for kind in ("S", "gain"))
