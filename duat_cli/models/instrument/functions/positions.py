"""Positions that attention may read: those that a mask leaves, told apart from those that softmax rounds to zero.

A softmax gives zero where a score lies some 100 below the largest of its row (17 in float16), and so does a mask. Where
no mask was seen, H is computed again with almost no scores: an entry that is zero there as well is masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.models.arrays import reached
from duat_cli.models.instrument.attention import AttentionCall, at_zero_queries
from duat_cli.models.instrument.records import BlockRun
from duat_cli.models.instrument.windows import WindowRows


def positions(run: BlockRun, call: AttentionCall | None = None) -> Tensor | None:
    """The positions that the mask leaves to some head, (N, K) bool; None where they are those at which H is not zero.

    For an intercepted softmax the block is replayed on a zero stream, where only biases make scores. Positions that the
    input chooses are chosen differently there, so a position whose own score shows a mask stays masked.

    call: None for the block's own attention, or another one, which reads an encoder and is not replayed in this way.
    """
    call = run.attention[0] if call is None else call
    if call.allowed is not None or call.path == "frozen kernel":
        return call.allowed
    read = _read(call)
    if bool(read.all()):
        return None
    found = at_zero_queries(call) if call.scored is not None else _at_zero_stream(run, call)
    if found is None or found.shape != read.shape[1:] or not bool((found & ~read).any()):
        return None
    return found | read.any(dim=0)


def _read(call: AttentionCall) -> Tensor:
    """The positions at which H of some head is not zero, for each prompt of a batch: (prompts, N, K)."""
    if isinstance(call.rows, WindowRows):
        return (call.rows.weights != 0).any(dim=1)
    return reached(call.rows.chunks())[None]


def _at_zero_stream(run: BlockRun, call: AttentionCall) -> Tensor | None:
    finite = call.finite
    if len(run.attention) != 1 or call is not run.attention[0] or finite is None or bool((finite != finite[:1]).any()):
        return None
    seen: list[Tensor] = []
    with run.looking(seen.append):
        run.replay(torch.zeros_like(run.input), stop_at_values=True)
    if len(seen) != 1 or seen[0].shape[-2:] != finite.shape[1:]:
        return None
    return (seen[0].flatten(0, -3) != 0).any(dim=0) & finite[0]
