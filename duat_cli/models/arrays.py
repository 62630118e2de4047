"""Small numeric helpers shared by discovery, replay and factors."""

from __future__ import annotations

import torch
from torch import Tensor


def resolution(dtype: torch.dtype) -> float:
    """Machine epsilon of the dtype that the comparison is made in."""
    return float(torch.finfo(dtype).eps)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| (Frobenius); 0 where both vanish, infinity where only `expected` does."""
    difference = float(torch.linalg.vector_norm((got - expected).detach(), dtype=torch.float64))
    size = float(torch.linalg.vector_norm(expected.detach(), dtype=torch.float64))
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def random_like(x: Tensor, seed: int = 20240511) -> Tensor:
    """Gaussian noise of the shape and size of `x`, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator).to(x)
    return noise * x.square().mean().sqrt().clamp_min(1e-3)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one memory."""
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def tolerance_for(dtype: torch.dtype) -> float:
    """The relative error up to which a rebuilt output counts as the model's own."""
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
