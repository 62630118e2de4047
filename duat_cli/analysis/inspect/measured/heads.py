"""Where the rows of H look, head by head: gathered from pieces of rows, so that H need not exist whole.

p_ij = |H_ij| / Σ_j |H_ij|, which for a softmax over the tokens is H itself. Rows are worked on in the dtype of the run
(float32 at least), means over them are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.inspect.measured.numbers import row_pieces
from duat_cli.models.arrays import wide
from duat_cli.models.budgets import measured_at_once
from duat_cli.operators.coupling import distances

OF_ROWS = ("entropy_bits", "effective_context", "mean_distance")
OF_LATER = ("first_token_share", "current_token_share", "previous_token_share")
OF_REPEATED = ("duplicate_token_share", "induction_share")
NAMES = (*OF_ROWS, *OF_LATER, *OF_REPEATED)

Chunks = Iterable[tuple[slice, Tensor]]


@dataclass(frozen=True)
class HeadNumbers:
    """By name of a number its value of every head, NaN where no row counts; how many rows have a repeated token."""

    values: dict[str, list[float]]
    row_sums: list[float]
    rows: dict[str, int]  # of OF_REPEATED, without those that see nothing


@dataclass(frozen=True)
class _Rows:
    """What every row of every head has, (heads, N) each."""

    values: dict[str, Tensor]
    sums: Tensor
    alive: Tensor
    reached: Tensor  # by some head, (N, K) bool


def measured_heads(chunks: Chunks, allowed: Tensor | None, tokens: Tensor | None) -> tuple[HeadNumbers, HeadNumbers]:
    """Of H, and of the uniform one over the tokens that each row may see.

    chunks: as of `RowSource`, of a square H; allowed: what the mask leaves to some head, (N, N) bool, None where none
    was seen; tokens: t, (N,), None where positions hold none.
    """
    own = _rows(chunks, tokens)
    beyond = allowed is None or bool((own.reached & ~allowed).any())
    seen = own.reached if allowed is None or beyond else allowed
    counted = {name: _of_repeated(name, seen, tokens) for name in OF_REPEATED}
    uniform = _rows([(slice(0, len(seen)), seen[None])], tokens)
    return _means(own, counted), _means(uniform, counted)


def marked(name: str, tokens: Tensor, start: int, count: int) -> Tensor:
    """The positions of OF_REPEATED that the rows start … start + count - 1 are asked for, (count, N) bool."""
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
    """Of the rows from `start` on, (heads, n, N): (heads, n) each; zero of a row of zeros."""
    count, size = weights.shape[1:]
    sizes = weights.abs()
    largest = sizes.amax(dim=-1, keepdim=True)
    alive = largest > 0
    sizes = sizes / largest.masked_fill(~alive, 1)  # no sum of them underflows
    p = sizes / sizes.sum(dim=-1, keepdim=True).masked_fill(~alive, 1)
    alive = alive[..., 0].to(p.dtype)
    # 0 log 0 = 0; a plain logarithm is several times faster than xlogy
    entropy = (-(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(dim=-1) / math.log(2)).clamp_min(0)
    own = torch.arange(start, start + count, device=p.device).expand(len(p), -1)[..., None]
    found = {
        "alive": alive,
        "entropy_bits": entropy,
        "effective_context": torch.exp2(entropy) * alive,
        "mean_distance": (p * distances(start, count, size, p.dtype, p.device)).sum(dim=-1),
        "first_token_share": p[..., 0],
        "current_token_share": p.gather(2, own)[..., 0],
        "previous_token_share": p.gather(2, (own - 1).clamp_min(0))[..., 0],  # row 0 is in no mean of it
    }
    if tokens is not None:
        found |= {n: (p * marked(n, tokens, start, count)).sum(dim=-1).clamp_max(1) for n in OF_REPEATED}
    return found


def _of_repeated(name: str, seen: Tensor, tokens: Tensor | None) -> Tensor:
    """The rows that see a position that is asked for, (N,) bool."""
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
