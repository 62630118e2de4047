"""What each attention head reads: the sums of measured/heads.py as a result, every null with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.inspect.assemble import ONE_TOKEN
from duat_cli.analysis.inspect.measured.heads import NAMES, OF_LATER, OF_REPEATED, HeadNumbers, measured_heads
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.attention import RowSource, StoredRows
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.windows import WindowRows
from duat_cli.results.heads import Attended, HeadAttended, Heads

NO_H = "no H of it was captured: it has no token mixer, or none whose form is proved"
WINDOWS = "its attention is over windows whose tokens are not known"
OTHER_VECTORS = "its attention reaches other vectors than the block's own tokens"
ZERO_ROWS = "every row of its H is zero"
NO_TOKENS = "the block's positions are no tokens of a text, so none is equal to another"
NOT_REPEATED = {
    "duplicate_token_share": "no row sees its own token a second time in front of itself",
    "induction_share": "no row sees a token that stands behind another occurrence of the row's own",
}
_ROWS = {"duplicate_token_share": "duplicate_rows", "induction_share": "induction_rows"}


def tokens_of(prompt: Prompt) -> Tensor | None:
    """The prompt's token ids, (N,), below zero and each once where pieces of a picture stand; None where the model
    reads none."""
    if prompt.prepared is not None:
        given = prompt.prepared.get("input_ids")
        if given is None or not torch.equal(given.cpu(), prompt.input_ids.cpu()):  # these count positions
            return None
    ids = prompt.input_ids[0].clone()
    places = torch.tensor(prompt.pictures, dtype=torch.int64, device=ids.device)
    ids[places] = -1 - places
    return ids


def heads(run: BlockRun, tokens: Sequence[Tensor | None]) -> list[Heads]:
    """Of one block under each prompt of the run; what cannot be told is null with the reason. tokens: of each prompt,
    as of `tokens_of`."""
    try:
        return [_heads(rows, run, ids) for rows, ids in zip(_rows_of(run), tokens, strict=True)]
    except UnsupportedModelError as fault:
        return [Heads.absent(str(fault)) for _ in tokens]


def _rows_of(run: BlockRun) -> list[RowSource]:
    """H of each prompt, (heads, N, N). UnsupportedModelError where there is none."""
    if not run.attention:
        raise UnsupportedModelError(NO_H)
    if len(run.attention) != 1:
        raise UnsupportedModelError(f"it calls attention {len(run.attention)} times; heads are read of one call")
    [call], count = run.attention, run.input.shape[1]
    if run.prompts > 1:
        assert isinstance(call.rows, WindowRows)
        return [StoredRows(weights) for weights in call.rows.weights]
    if call.windows is not None and call.windows.at is None:
        raise UnsupportedModelError(WINDOWS)
    if call.rows.tokens != count or call.value.shape[2] != count:
        raise UnsupportedModelError(OTHER_VECTORS)
    return [call.rows]


def _heads(rows: RowSource, run: BlockRun, ids: Tensor | None) -> Heads:
    if ids is not None and len(ids) != rows.tokens:
        ids = None
    ids = None if ids is None else ids.to(run.input.device)
    own, uniform = measured_heads(rows.chunks(), run.attention[0].allowed, ids)
    reasons = {name: NO_TOKENS if ids is None else NOT_REPEATED[name] for name in OF_REPEATED}
    if rows.tokens == 1:
        reasons |= dict.fromkeys(OF_LATER, ONE_TOKEN)
    each = [
        HeadAttended.explained(ZERO_ROWS, reasons, index=head, row_sum=own.row_sums[head], **_numbers(own, head))
        for head in range(len(own.row_sums))
    ]
    counts = {field: None if ids is None else uniform.rows[name] for name, field in _ROWS.items()}
    null = Attended.explained(ZERO_ROWS, reasons, **_numbers(uniform, 0))
    return Heads.explained(NO_TOKENS, each=each, uniform=null, **counts)


def _numbers(found: HeadNumbers, head: int) -> dict[str, Any]:
    values = {name: found.values[name][head] for name in NAMES}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
