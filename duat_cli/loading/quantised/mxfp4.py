"""MXFP4 of gpt-oss: 32 numbers of four bits share a power of two (OCP Microscaling Formats 1.0).

Stored are (experts, out, groups, 16) bytes and (experts, out, groups) exponents. The model holds (experts, in, out), as
transformers' `convert_moe_packed_tensors` returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from duat_cli.loading.quantised.formula import Arrays, Formula, Found, Tensor, UnfitError, require
from duat_cli.loading.quantised.numbers import LARGEST, Floats, fp4, power_of_two

_BYTES = 16  # bytes of a block of 32 numbers


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Formula):
    """Four-bit numbers in blocks. Roles: blocks and scales. A step is one expert."""

    exact_in: ClassVar[str] = "BF16"

    def rows(self, arrays: Arrays, start: int, stop: int) -> Floats:
        chosen = slice(start // self.shape[-2], -(-stop // self.shape[-2]))
        values = fp4(arrays["blocks"][chosen])  # (experts, out, groups, 32)
        values *= power_of_two(arrays["scales"][chosen])[..., None]
        matrices = values.reshape(*values.shape[:2], -1).transpose(0, 2, 1)
        return np.ascontiguousarray(matrices).reshape(-1, self.shape[-1])


def mxfp4(tensors: Mapping[str, Tensor]) -> Found:
    """The weights of a checkpoint of quant_method mxfp4."""
    weights: dict[str, Formula] = {}
    for name, tensor in tensors.items():
        own = name.removesuffix("_blocks")
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" not in tensors:
            raise UnfitError(name, "scales without their '_blocks': fetch the checkpoint again")
        if own == name:
            continue
        shape = tensor.shape
        if tensor.dtype != "U8" or len(shape) != 4 or shape[-1] != _BYTES:
            raise UnfitError(
                name, f"expected U8 of [experts, out, groups, {_BYTES}], got {tensor.dtype} of {list(shape)}"
            )
        require(tensors, name, f"{own}_scales", shape[:3], ("U8",))
        weights[own] = Mxfp4(
            shape=(shape[0], shape[2] * 2 * _BYTES, shape[1]),
            parts={"blocks": name, "scales": f"{own}_scales"},
            dtypes={"blocks": "U8", "scales": "U8"},
            largest=LARGEST["FP4"],
            zero_blocks=True,
            step=shape[2] * 2 * _BYTES,
        )
    return Found("mxfp4 (e2m1, 32 share a power of two)", weights)
