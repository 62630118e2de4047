"""The leading singular triplets of a matrix that is only known by its products: Golub-Kahan-Lanczos."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli.operators.lowrank import Triplets

SEED = 17
CHECK_EVERY = 8


def leading(
    apply: Callable[[Tensor], Tensor],
    apply_transposed: Callable[[Tensor], Tensor],
    like: Tensor,
    columns: int,
    count: int,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 400,
) -> Triplets | None:
    """The `count` largest triplets of an operator from R^columns, with full reorthogonalisation.

    A triplet counts as found when its Ritz residual is at most tolerance x σ. None where that does not happen
    within `max_steps`, or where the operator has fewer directions than asked for.
    """
    generator = torch.Generator().manual_seed(SEED)
    v = torch.randn(columns, generator=generator).to(like)
    rights, lefts = [v / v.norm()], list[Tensor]()
    alphas, betas = list[float](), list[float]()
    for step in range(1, max_steps + 1):
        u = _orthogonal(apply(rights[-1]), lefts)
        alphas.append(float(u.norm()))
        if alphas[-1] <= _tiny(like) * max(alphas):
            return None
        lefts.append(u / alphas[-1])
        w = _orthogonal(apply_transposed(lefts[-1]), rights)
        beta = float(w.norm())
        exhausted = beta <= _tiny(like) * max(alphas)
        if step >= count and (step % CHECK_EVERY == 0 or exhausted or step == max_steps):
            core = torch.diag(torch.tensor(alphas, dtype=torch.float64))
            core += torch.diag(torch.tensor(betas, dtype=torch.float64), 1) if betas else 0
            p, s, qh = torch.linalg.svd(core)
            residual = beta * p[-1, :count].abs()
            if bool((residual <= tolerance * s[:count]).all()):
                left = torch.stack(lefts, 1) @ p[:, :count].to(like)
                right = torch.stack(rights, 1) @ qh[:count].mT.to(like)
                return Triplets(left, s[:count], right)
        if exhausted:
            return None
        betas.append(beta)
        rights.append(w / beta)
    return None


def _orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    """`vector` less its components in `basis`, twice, because once is not enough in floating point."""
    if basis:
        stacked = torch.stack(basis)
        for _ in range(2):
            vector = vector - stacked.mT @ (stacked @ vector)
    return vector


def _tiny(like: Tensor) -> float:
    return 10 * float(torch.finfo(like.dtype).eps)
