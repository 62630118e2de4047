"""The largest singular value of an operator that is only known by its products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli.errors import InputError


def spectral_norm(
    apply: Callable[[Tensor], Tensor],
    apply_transposed: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 300,
) -> float:
    """‖A‖₂ by Golub-Kahan-Lanczos bidiagonalisation with full reorthogonalisation.

    start: a vector (any shape) of the operator's input space. Stops when the Ritz residual bounds the relative
    error of σ_1 by `tolerance` / 10, or when the Krylov space is exhausted. Raises InputError where it does not
    converge in `max_steps`.
    """
    shape, v = start.shape, start.reshape(-1).double()
    v = v / torch.linalg.vector_norm(v)
    right, left = [v], list[Tensor]()
    alphas: list[float] = []
    betas: list[float] = []
    for step in range(max_steps):
        u = _product(apply, right[-1], shape, start.dtype)
        u = orthogonal(u, left)
        alphas.append(float(torch.linalg.vector_norm(u)))
        if alphas[-1] == 0.0:
            return _largest(alphas[:-1] or [0.0], betas[: max(step - 1, 0)])[0]
        left.append(u / alphas[-1])
        w = orthogonal(_product(apply_transposed, left[-1], shape, start.dtype), right)
        beta = float(torch.linalg.vector_norm(w))
        sigma, last = _largest(alphas, betas)
        if beta * last <= 0.1 * tolerance * sigma or len(right) == right[0].numel():
            return sigma
        betas.append(beta)
        right.append(w / beta)
    raise InputError(f"the spectral norm did not converge to {tolerance:g} within {max_steps} Lanczos steps")


def _product(apply: Callable[[Tensor], Tensor], vector: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return apply(vector.reshape(shape).to(dtype)).reshape(-1).double()


def orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    """`vector` less its components in `basis`, twice, because once is not enough in floating point."""
    if basis:
        stacked = torch.stack(basis)
        for _ in range(2):
            vector = vector - stacked.mT @ (stacked @ vector)
    return vector


def _largest(alphas: list[float], betas: list[float]) -> tuple[float, float]:
    """The largest singular value of the bidiagonal matrix, and the size of its left vector's last entry."""
    bidiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    if betas:
        bidiagonal += torch.diag(torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64), 1)
    U, S, _ = torch.linalg.svd(bidiagonal)
    return float(S[0]), abs(float(U[-1, 0]))
