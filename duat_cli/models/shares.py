"""What the parts of a sum make of it: their shares over all tokens together, and in the vector of a typical token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.models.arrays import wide


@dataclass(frozen=True)
class PartNumbers:
    """All are None where the whole is zero."""

    share: float | None  # ⟨part, x⟩ / ‖x‖² over all tokens
    norm: float | None  # ‖part‖ / ‖x‖
    token_median: float | None  # median over the tokens t of ⟨part_t, x_t⟩ / ‖x_t‖²


@dataclass(frozen=True)
class Shares:
    parts: list[PartNumbers]
    largest_token: float | None  # the largest ‖x_t‖² / ‖x‖² of a token t; None where the whole is zero


def shares(parts: Sequence[Tensor], whole: Tensor) -> Shares:
    """Numbers of each part of `whole`, all (N, width)."""
    [found] = shares_each(parts, whole, 1)
    return found


def shares_each(parts: Sequence[Tensor], whole: Tensor, prompts: int) -> list[Shares]:
    """The same for each prompt of a batch; the tokens of the prompts follow one another on axis 0.

    Each token's products are in float32 at least, sums over tokens in float64. A token whose vector is zero has no
    share of its own, and is left out of the median.
    """
    x = wide(whole)
    each = [torch.linalg.vecdot(x, x)]
    for part in map(wide, parts):  # one at a time: of half precision these are copies
        each += [torch.linalg.vecdot(part, x), torch.linalg.vecdot(part, part)]
    products = torch.stack(each).double().reshape(len(each), prompts, -1)
    sizes = products[0]
    medians = (products[1::2] / sizes.where(sizes > 0, math.nan)).nanquantile(0.5, dim=-1)
    sums = torch.cat([products.sum(dim=-1), medians, sizes.amax(dim=-1, keepdim=True).T])  # one wait for the device
    return [_shares(len(parts), numbers) for numbers in sums.T.tolist()]


def _shares(parts: int, numbers: Sequence[float]) -> Shares:
    size, *rest = numbers
    if not size:
        return Shares([PartNumbers(None, None, None)] * parts, None)
    met, squares, medians, largest = rest[: 2 * parts : 2], rest[1 : 2 * parts : 2], rest[2 * parts : -1], rest[-1]
    each = zip(met, squares, medians, strict=True)
    return Shares([PartNumbers(a / size, (b / size) ** 0.5, median) for a, b, median in each], largest / size)
