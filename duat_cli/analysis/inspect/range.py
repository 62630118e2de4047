"""Whether a checkpoint's activations fit into the dtype in which it is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from duat_cli.models.instrument.activations import Place
from duat_cli.results.inspect import Range

_NEAR = 0.5  # of the largest number; another prompt may take what is left
_WIDE = torch.finfo(torch.bfloat16).max


def block_range(stored: torch.dtype | None, dtype: str, largest: tuple[float, Place]) -> Range:
    """stored: the dtype of most stored bytes, if known; dtype: of the run; largest: of one block over all prompts."""
    size, place = largest
    limit = math.inf if stored is None else torch.finfo(stored).max
    reasons = {}
    if not math.isfinite(size):
        reasons = dict.fromkeys(("largest_activation", "share"), f"an output is not finite in {dtype}")
    elif limit >= _WIDE:
        reasons = {"share": "no activation comes near the largest number of the stored dtype"}
    return Range(
        largest_activation=None if "largest_activation" in reasons else size,
        place=place,
        stored_dtype=None if stored is None else str(stored).removeprefix("torch."),
        share=None if reasons else size / limit,
        reasons=reasons if stored is not None else reasons | {"stored_dtype": "no floating-point tensor is stored"},
    )


def range_warnings(ranges: Mapping[int, Range]) -> list[str]:
    """One line about the worst block, if it comes near the end of the stored dtype."""
    share, block = max(((r.share or 0.0, i) for i, r in ranges.items()), default=(0.0, 0))
    if share <= _NEAR:
        return []
    worst = ranges[block]
    what = "overflows" if share > 1 else "is close to overflowing"
    return [
        f"activations reach {worst.largest_activation:.3g} in block {block}, {share:.3g} of the largest number of "
        f"{worst.stored_dtype}, in which the checkpoint is stored: run in it, it {what}"
    ]
