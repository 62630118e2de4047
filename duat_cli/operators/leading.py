"""The leading singular triplets of an operator known only by its products, by Golub-Kahan-Lanczos."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.operators.lowrank import Triplets

SEED = 17
CHECK_EVERY = 8
TOLERANCE = 1e-3


def leading(
    apply: Callable[[Tensor], Tensor],
    apply_transposed: Callable[[Tensor], Tensor],
    like: Tensor,
    columns: int,
    count: int,
    *,
    tolerance: float = TOLERANCE,
    max_steps: int = 400,
    fewer: bool = False,
) -> Triplets | None:
    """The `count` largest triplets of an operator from R^columns, with full reorthogonalisation.

    A triplet counts as found when its Ritz residual is at most tolerance x σ. The result is None where that does not
    happen within `max_steps`, or where the operator has fewer directions than asked for. With `fewer`, the directions
    that it has are returned, as far as one starting vector shows them: of equal singular values it shows one.
    """
    generator = torch.Generator().manual_seed(SEED)
    v = torch.randn(columns, generator=generator).to(like)
    rights, lefts = [v / v.norm()], list[Tensor]()
    alphas, betas = list[float](), list[float]()
    for step in range(1, max_steps + 1):
        u = orthogonal(apply(rights[-1]), lefts)
        alpha = float(u.norm())
        if alpha <= _tiny(like) * max([*alphas, *betas, alpha]):  # no new direction: the space found maps into itself
            return _triplets(alphas, betas, lefts, rights, count, fewer)
        alphas.append(alpha)
        lefts.append(u / alpha)
        w = orthogonal(apply_transposed(lefts[-1]), rights)
        beta = float(w.norm())
        if beta <= _tiny(like) * max(alphas):
            return _triplets(alphas, betas, lefts, rights, count, fewer)
        if step >= count and (step % CHECK_EVERY == 0 or step == max_steps):
            p, s, _ = torch.linalg.svd(_core(alphas, betas, step), full_matrices=False)
            if bool((beta * p[-1, :count].abs() <= tolerance * s[:count]).all()):
                return _triplets(alphas, betas, lefts, rights, count, fewer)
        betas.append(beta)
        rights.append(w / beta)
    return None


def spectral_norm(
    apply: Callable[[Tensor], Tensor],
    apply_transposed: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    image: tuple[int, ...] | None = None,
    max_steps: int = 400,
) -> float:
    """‖A‖₂, the first value of `leading`, with a Ritz residual of at most `TOLERANCE` / 10 of it.

    Vectors are kept in float64. Raises InputError where it does not converge in `max_steps`.

    start: a random tensor of the shape and dtype that `apply` takes; an operator that maps it to zero counts as zero.
    image: the shape that `apply` returns; None: the same.
    """

    def flat(product: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        return lambda v: product(v.reshape(shape).to(start.dtype)).reshape(-1).double()

    if not bool(apply(start).any()):
        return 0.0
    like = start.reshape(-1).double()
    found = leading(
        flat(apply, tuple(start.shape)),
        flat(apply_transposed, image or tuple(start.shape)),
        like,
        len(like),
        1,
        tolerance=0.1 * TOLERANCE,
        max_steps=max_steps,
        fewer=True,
    )
    if found is None:
        raise InputError(f"the spectral norm did not converge to {TOLERANCE:g} within {max_steps} Lanczos steps")
    return float(found.values[0])


def orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    """`vector` less its components in `basis`, removed twice, because once is not enough in floating point."""
    if basis:
        stacked = torch.stack(basis)
        for _ in range(2):
            vector = vector - stacked.mT @ (stacked @ vector)
    return vector


def _core(alphas: list[float], betas: list[float], columns: int) -> Tensor:
    """The operator between the two bases, upper bidiagonal, with one more column where the last alpha vanished."""
    core = torch.zeros(len(alphas), columns, dtype=torch.float64)
    core.diagonal().copy_(torch.tensor(alphas, dtype=torch.float64))
    upper = core.diagonal(1)
    upper.copy_(torch.tensor(betas[: len(upper)], dtype=torch.float64))
    return core


def _triplets(
    alphas: list[float], betas: list[float], lefts: list[Tensor], rights: list[Tensor], count: int, fewer: bool
) -> Triplets | None:
    if not lefts or (len(lefts) < count and not fewer):
        return None
    p, s, qh = torch.linalg.svd(_core(alphas, betas, len(rights)), full_matrices=False)
    real = int((s[:count] > _tiny(lefts[0]) * s[0]).sum())
    if real < count and not fewer:
        return None
    count = real
    left = torch.stack(lefts, 1) @ p[:, :count].to(lefts[0])
    right = torch.stack(rights, 1) @ qh[:count].mT.to(lefts[0])
    return Triplets(left, s[:count], right)


def _tiny(like: Tensor) -> float:
    return 10 * float(torch.finfo(like.dtype).eps)
