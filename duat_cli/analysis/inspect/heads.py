"""Statistics of what each attention head reads, gathered from pieces of rows of H, so that H need not exist as a whole.

p_ij = |H_ij| / Σ_j |H_ij|, which for a softmax over the tokens is H itself. Rows are processed in the dtype of the run
(float32 at least), and means over them are taken in float64. Every null has its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.inspect.assemble import ONE_TOKEN
from duat_cli.analysis.inspect.measured.numbers import row_pieces, visible
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import wide
from duat_cli.models.budgets import measured_at_once
from duat_cli.models.instrument.attention import RowSource, StoredRows
from duat_cli.models.instrument.functions.positions import positions
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.windows import WindowRows
from duat_cli.operators.coupling import distances, entropies
from duat_cli.results.base import finite
from duat_cli.results.heads import Attended, HeadAttended, Heads

OF_ROWS = ("entropy_bits", "effective_context", "mean_distance")
OF_LATER = ("first_token_share", "current_token_share", "previous_token_share")
OF_REPEATED = ("duplicate_token_share", "induction_share")
NAMES = (*OF_ROWS, *OF_LATER, *OF_REPEATED)

Chunks = Iterable[tuple[slice, Tensor]]
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
    """The prompt's token ids, (N,); pieces of pictures, videos and sounds get distinct ids below zero. None where
    the model reads no token ids."""
    if prompt.prepared is not None:
        given = prompt.prepared.get("input_ids")
        if given is None or not torch.equal(given.cpu(), prompt.input_ids.cpu()):  # the prompt's ids count positions
            return None
    ids = prompt.input_ids[0].clone()
    places = torch.tensor(list(prompt.pieces), dtype=torch.int64, device=ids.device)
    ids[places] = -1 - places
    return ids


def heads(run: BlockRun, tokens: Sequence[Tensor | None]) -> list[Heads]:
    """Statistics of the heads of one block, for each prompt of the run; what is not known is null with the reason.
    tokens: of each prompt, from `tokens_of`."""
    try:
        each, allowed = _rows_of(run), positions(run)
        tokens = [None if ids is None else ids.to(run.input.device) for ids in tokens]
        return [_heads(rows, allowed, ids) for rows, ids in zip(each, tokens, strict=True)]
    except UnsupportedModelError as fault:
        return [Heads.absent(str(fault)) for _ in tokens]


def _rows_of(run: BlockRun) -> list[RowSource]:
    """H of each prompt, (heads, N, N). Raises UnsupportedModelError where there is none."""
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


def _heads(rows: RowSource, allowed: Tensor | None, ids: Tensor | None) -> Heads:
    """Statistics for one prompt. allowed: as for `measured_heads`; ids: token ids, (N,), or None."""
    if ids is not None and len(ids) != rows.tokens:
        ids = None
    own, uniform = measured_heads(rows.chunks(), allowed, ids)
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
    return {name: finite(found.values[name][head]) for name in NAMES}


# -- the rows of H -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadNumbers:
    """Numbers by name with a value for every head, NaN where no row counts."""

    values: dict[str, list[float]]
    row_sums: list[float]
    rows: dict[str, int]  # how many rows count, for each of OF_REPEATED, without rows of zeros


@dataclass(frozen=True)
class _Rows:
    """Values for every row of every head, (heads, N) each."""

    values: dict[str, Tensor]
    sums: Tensor
    alive: Tensor
    reached: Tensor  # which tokens some head reaches, (N, K) bool


def measured_heads(chunks: Chunks, allowed: Tensor | None, tokens: Tensor | None) -> tuple[HeadNumbers, HeadNumbers]:
    """Numbers of H, and of a uniform H over the tokens that each row may see.

    chunks: of a square H, as from `RowSource`; allowed: what the mask leaves visible to some head, (N, N) bool, None
    where no mask was seen; tokens: token ids, (N,), None where positions hold none.
    """
    own = _rows(chunks, tokens)
    seen = visible(own.reached, allowed)
    counted = {name: _of_repeated(name, seen, tokens) for name in OF_REPEATED}
    uniform = _rows([(slice(0, len(seen)), seen[None])], tokens)
    return _means(own, counted), _means(uniform, counted)


def marked(name: str, tokens: Tensor, start: int, count: int) -> Tensor:
    """Positions that count for one of OF_REPEATED, in the rows start … start + count - 1, (count, N) bool."""
    i, j = torch.arange(start, start + count, device=tokens.device)[:, None], torch.arange(len(tokens)).to(tokens)
    same = tokens[i] == tokens
    if name == "duplicate_token_share":
        return same & (j < i)
    behind = torch.zeros_like(same)
    behind[:, 1:] = same[:, :-1]
    return behind & (j - 1 != i)


def _rows(chunks: Chunks, tokens: Tensor | None) -> _Rows:
    found: list[dict[str, Tensor]] = []
    sums, reached = [], []
    for start, weights in row_pieces(chunks):
        reached.append((weights != 0).any(dim=0))
        sums.append(weights.sum(dim=-1, dtype=torch.float64))
        exact = wide(weights) if weights.is_floating_point() else weights.double()
        found.append(_of_piece(exact, start, tokens))
    values = {name: torch.cat([one[name] for one in found], dim=1).double() for name in found[0]}
    return _Rows(values, torch.cat(sums, dim=1), values.pop("alive") > 0, torch.cat(reached))


def _of_piece(weights: Tensor, start: int, tokens: Tensor | None) -> dict[str, Tensor]:
    """Numbers of the rows from `start` on, (heads, n) each; zero for a row of zeros. weights: (heads, n, N)."""
    count, size = weights.shape[1:]
    sizes = weights.abs()
    largest = sizes.amax(dim=-1, keepdim=True)
    alive = largest > 0
    sizes = sizes / largest.masked_fill(~alive, 1)  # so that no sum underflows
    p = sizes / sizes.sum(dim=-1, keepdim=True).masked_fill(~alive, 1)
    alive = alive[..., 0].to(p.dtype)
    entropy = entropies(p).clamp_min(0)
    own = torch.arange(start, start + count, device=p.device).expand(len(p), -1)[..., None]
    found = {
        "alive": alive,
        "entropy_bits": entropy,
        "effective_context": torch.exp2(entropy) * alive,
        "mean_distance": (p * distances(start, count, size, p.dtype, p.device)).sum(dim=-1),
        "first_token_share": p[..., 0],
        "current_token_share": p.gather(2, own)[..., 0],
        "previous_token_share": p.gather(2, (own - 1).clamp_min(0))[..., 0],  # its means leave out row 0
    }
    if tokens is not None:
        found |= {n: (p * marked(n, tokens, start, count)).sum(dim=-1).clamp_max(1) for n in OF_REPEATED}
    return found


def _of_repeated(name: str, seen: Tensor, tokens: Tensor | None) -> Tensor:
    """Which rows see a position that counts for `name`, (N,) bool."""
    if tokens is None:
        return seen.new_zeros(len(seen))
    step = max(1, measured_at_once(1, gpu=seen.is_cuda) // len(seen))
    pieces = [(first, seen[first : first + step]) for first in range(0, len(seen), step)]
    return torch.cat([(own & marked(name, tokens, first, len(own))).any(dim=1) for first, own in pieces])


def _means(rows: _Rows, counted: dict[str, Tensor]) -> HeadNumbers:
    later = torch.arange(rows.alive.shape[1], device=rows.alive.device) > 0
    which = {**dict.fromkeys(OF_ROWS, torch.ones_like(later)), **dict.fromkeys(OF_LATER, later), **counted}
    values = {}
    for name in NAMES:
        kept = which[name] & rows.alive
        each = rows.values.get(name)
        total = torch.zeros_like(rows.sums) if each is None else each * kept
        values[name] = (total.sum(dim=1) / kept.sum(dim=1)).tolist()  # 0 / 0 where no row counts
    met = {name: int((kept & rows.alive.any(dim=0)).sum()) for name, kept in counted.items()}
    return HeadNumbers(values, rows.sums.mean(dim=1).tolist(), met)
