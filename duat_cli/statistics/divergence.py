"""The Kullback-Leibler divergence of two distributions given by their logits."""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 1 << 22  # logits in float64: 32 MB


def by_tokens(logits: Tensor) -> tuple[Tensor, ...]:
    """Logits, (tokens, vocabulary), in pieces: in double precision those of a long prompt would not fit."""
    return logits.split(max(1, AT_ONCE // logits.shape[1]))


def kl(before: Tensor, after: Tensor) -> Tensor:
    """KL(softmax before || softmax after) = Σ_v p_v (log p_v - log q_v) of each row, nats: (N, V) twice to (N,).

    In float64. A token with p_v = 0 adds nothing, whatever q_v is; one with p_v > 0 and q_v = 0 makes it infinite.
    NaN logits give NaN.
    """
    rows = [_rows(p, q) for p, q in zip(by_tokens(before), by_tokens(after), strict=True)]
    return torch.cat(rows)


def _rows(before: Tensor, after: Tensor) -> Tensor:
    a, b = (x.double().log_softmax(dim=-1) for x in (before, after))
    p = a.exp()
    return torch.where(p == 0, 0.0, p * (a - b)).sum(dim=-1).clamp_min(0)  # below zero by rounding alone
