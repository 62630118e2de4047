"""Small numeric helpers shared by discovery, replay and factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_SQUARES = 1e-15, 1e15  # norms whose squares are in the range of float32; beyond them float64 is taken


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that two ways to compute one number may have after a few operations.

    Not below 1e-5: many models compute norms and softmax in float32, whatever their weights are.
    """
    return max(1e-5, 4 * float(torch.finfo(dtype).eps))


def in_narrow(dtype: torch.dtype) -> str:
    """The end of an error text where rounding may be the cause; empty for float32 and wider."""
    name = str(dtype).removeprefix("torch.")
    return "" if dtype.itemsize >= 4 else f"; in {name} rounding may hide it, try --dtype float32"


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| (Frobenius); 0 where both vanish, infinity where only `expected` does.

    Infinity also where a value is not finite: a later `max` over errors would lose a NaN.
    """
    return _ratio(*_lengths((got - expected).detach(), expected.detach()))


def relative_errors(got: Tensor, expected: Tensor, prompts: int, axis: int = 0) -> list[float]:
    """The relative error of each prompt; the tokens of the prompts follow one another along `axis`."""
    if prompts == 1:
        return [relative_error(got, expected)]
    by_prompt = [
        torch.linalg.vector_norm(wide(x).movedim(axis, 0).reshape(prompts, -1), dim=1).tolist()
        for x in (got - expected, expected)
    ]
    return [_ratio(difference, size) for difference, size in zip(*by_prompt, strict=True)]


def token_errors(got: Tensor, expected: Tensor, beside: Iterable[Tensor], prompts: int) -> list[float]:
    """The relative error of each prompt, over all its tokens together or of its worst token, whichever is larger.

    The norm over all tokens is that of the few with massive activations, where a model has them, and says little of the
    others. got, expected: (prompts * N, width), the tokens of the prompts one after another; beside: tensors of that
    length from which a token was computed. The error of a token is relative to the largest norm among all these, as
    where large values cancel their rounding is left.
    """
    norms = token_norms([got - expected, expected, *beside])
    over_all = torch.linalg.vector_norm(norms[:2].reshape(2, prompts, -1), dim=-1).T.tolist()
    of_tokens = norms[0] / norms[1:].amax(dim=0)
    of_tokens.nan_to_num_(nan=0.0, posinf=math.inf)  # 0 / 0 is no error
    worst = of_tokens.reshape(prompts, -1).amax(dim=-1).tolist()
    return [max(_ratio(*both), one) for both, one in zip(over_all, worst, strict=True)]


def token_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norms of the rows of each tensor, (len(tensors), rows), in float64; the widths of the rows may differ."""
    norms = torch.stack([torch.linalg.vector_norm(wide(x.detach()), dim=-1) for x in tensors]).double()
    low, high = torch.stack(norms.aminmax()).tolist()
    if _SQUARES[0] < low and high < _SQUARES[1]:
        return norms
    return torch.stack([torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float64) for x in tensors])


def token_changes(before: Tensor, after: Tensor) -> Tensor:
    """|b_t - a_t| / |a_t| of the tokens t where a_t is not zero. before, after: a and b, (N, width)."""
    sizes, moved = token_norms([before, wide(after) - wide(before)])
    known = sizes > 0
    return moved[known] / sizes[known]


def _ratio(difference: float, size: float) -> float:
    """difference / size, with the special cases of `relative_error`."""
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    error = difference / size
    return error if math.isfinite(error) else math.inf


def _lengths(*tensors: Tensor) -> list[float]:
    """Frobenius norms, read from the device at once; a dot product is the cheapest pass over a small tensor."""
    each = [wide(x).reshape(-1) for x in tensors]
    squares = torch.stack([torch.dot(x, x) for x in each]).tolist()
    low, high = _SQUARES
    return [
        square**0.5 if low**2 < square < high**2 else float(torch.linalg.vector_norm(x, dtype=torch.float64))
        for x, square in zip(each, squares, strict=True)
    ]


def wide(x: Tensor) -> Tensor:
    """The tensor in at least float32: squares in half precision overflow, and sums lose too much."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def random_like(x: Tensor, seed: int = 20240511) -> Tensor:
    """Gaussian noise of the shape and size of `x`, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(seed)
    size = wide(x).square().mean().sqrt().clamp_min(1e-3)
    return (torch.randn(x.shape, generator=generator).to(size) * size).to(x.dtype)


def gaussian(shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    """Standard Gaussian noise with the dtype and the device of `like`, the same on every device and in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one memory."""
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors hold the same values in the same order, whatever their leading axes."""
    if a is None or b is None or a.numel() != b.numel() or a.shape[-1] != b.shape[-1] or a.device != b.device:
        return False
    return a.dtype == b.dtype and torch.equal(a.reshape(-1), b.reshape(-1))


def moved(values: Tensor, item: int) -> bool:
    """Whether the values of this item of a replay differ from those of the first item by more than rounding."""
    return bool((values[item] - values[0]).abs().max() > 1e-6 * (1 + values[0].abs().max()))


def reached(chunks: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """The positions at which some head's weight is not zero, (N, K) bool. chunks: those of H, as in `RowSource`."""
    return torch.cat([(weights != 0).any(dim=0) for _, weights in chunks])


def tolerance_for(dtype: torch.dtype) -> float:
    """The relative error up to which a rebuilt output counts as the model's own.

    For float64 it allows for float32 inside norms and softmax, which many models have.
    """
    return {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]


def rounding_for(dtype: torch.dtype) -> float:
    """The relative change of a block's numbers from one prompt to another that rounding alone may make."""
    return max(tolerance_for(dtype) / 100, float(torch.finfo(dtype).eps))


def random_signs(like: Tensor, seed: int) -> Tensor:
    """1 and -1 at random, in the shape and dtype of `like`."""
    return torch.where(gaussian(tuple(like.shape), like, seed) < 0, -torch.ones_like(like), torch.ones_like(like))


def fit(direction: Tensor, target: Tensor) -> Tensor:
    """The scalars that fit `direction` to `target` along the last axis."""
    square = direction.square().sum(dim=-1, keepdim=True)
    return (direction * target).sum(dim=-1, keepdim=True) / square.clamp_min(torch.finfo(square.dtype).tiny)


def or_else(scale: Tensor, direction: Tensor, other: Callable[[], Tensor]) -> Tensor:
    """Scalars fitted to `direction`. Where it is zero, so that any scalar would fit, `other()`, called only then."""
    nothing = ~direction.any(dim=-1, keepdim=True)
    return torch.where(nothing, other(), scale) if bool(nothing.any()) else scale


def fit_heads(direction: Tensor, target: Tensor) -> Tensor:
    """The scalars that fit `direction` to `target`, (heads, N, d), for each head and token: (heads, N, 1). Heads of one
    channel, which any scalar of their own would fit, share one scalar for each token."""
    if direction.shape[-1] > 1:
        return fit(direction, target)
    alone = fit(direction[..., 0].T, target[..., 0].T)  # (N, 1)
    return alone.expand_as(target)
