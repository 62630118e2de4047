"""Distributions given by their logits: the Kullback-Leibler divergence of two, and the loss of drawn entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AT_ONCE = 1 << 16  # logits in float64: 512 kB, which fit the cache


def by_tokens(logits: Tensor) -> tuple[Tensor, ...]:
    """Logits, (tokens, vocabulary), in pieces, because those of a long prompt would not fit memory in double
    precision."""
    return logits.split(max(1, AT_ONCE // logits.shape[1]))


def kl(before: Tensor, after: Tensor) -> Tensor:
    """KL(softmax before || softmax after) = Σ_v p_v (log p_v - log q_v) of each row, nats: (N, V) twice to (N,).

    In float64. A token with p_v = 0 adds nothing, whatever q_v is; one with p_v > 0 and q_v = 0 makes it infinite.
    NaN logits give NaN.
    """
    return kl_each(before, after[None])[0]


def kl_each(before: Tensor, afters: Tensor) -> Tensor:
    """KL, as `kl`, of several distributions relative to one, (B, N), from `before` (N, V) and `afters` (B, N, V)."""
    pieces = zip(by_tokens(before), *(by_tokens(after) for after in afters), strict=True)
    return torch.cat([_rows(p, others) for p, *others in pieces], dim=1)


def mean_loss(logits: Tensor, chosen: Tensor) -> float:
    """Mean negative log likelihood, nats, of the entries `chosen`, (N,), under logits (N, V)."""
    log_p = logits.double().log_softmax(dim=-1)
    return -float(log_p.gather(1, chosen[:, None].to(logits.device)).mean())


def _rows(before: Tensor, afters: Sequence[Tensor]) -> Tensor:
    a = before.double().log_softmax(dim=-1)
    p = a.exp()
    nothing = p == 0
    apart = (p * (a - after.double().log_softmax(dim=-1)) for after in afters)
    found = [torch.where(nothing, 0.0, each).sum(dim=-1) for each in apart]
    return torch.stack(found).clamp_min(0)  # negative only by rounding
