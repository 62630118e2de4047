"""FP8 of DeepSeek-V3, Qwen and Mistral: matrices of eight-bit floats, each block, row or tensor with its scale.

Source: DeepSeek-V3's `weight_dequant`; transformers' `FineGrainedFP8Config` and `FbgemmFp8Config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from duat_cli.loading.quantised.formula import Formula, Found, Tensor, leaf_of, missing
from duat_cli.loading.quantised.scaled import scaled

_VALUES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# names of activations' scales; activations are not quantised here
_BESIDE = ("activation_scale", "input_scale", "qscale_act", "input_scale_ub")


def fp8(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Found:
    """The weights of a checkpoint of quant_method fp8, fbgemm_fp8 or mxfp8."""
    size = config.get("weight_block_size")
    blocks = [(int(size[0]), int(size[1]))] if isinstance(size, list) and len(size) == 2 and all(size) else []
    weights = dict(_weights(tensors, blocks))
    kinds = sorted({formula.dtypes["values"] for formula in weights.values()})
    many = f"blocks of {blocks[0][0]} x {blocks[0][1]}" if blocks else "a scale for each row or tensor"
    named = ", ".join("fp4 e2m1" if kind == "I8" else kind.removeprefix("F8_").lower() for kind in kinds)
    beside = {name for name in tensors if leaf_of(name).endswith(_BESIDE)}
    return Found(f"fp8 ({named}, {many})", weights, frozenset(beside))


def _weights(tensors: Mapping[str, Tensor], blocks: list[tuple[int, int]]) -> Iterator[tuple[str, Formula]]:
    for name, tensor in tensors.items():
        names = _scales(name)
        scale = next((n for n in names if n in tensors), None)
        if tensor.dtype in _VALUES and 0 not in tensor.shape and not name.endswith(_SCALE):
            if scale is None:
                raise missing(tensors, name, names[0])
            yield name, scaled(tensors, name, scale, blocks=blocks)
        elif tensor.dtype == "I8" and scale is not None:  # four-bit numbers in pairs: experts of DeepSeek-V4
            yield name, scaled(tensors, name, scale, blocks=[(1, 32)], pairs=True)


_SCALE = ("scale_inv", "scale", "qscale_weight")


def _scales(name: str) -> list[str]:
    """Names that the scales of a weight may have. A scale that is called an inverse is multiplied by as well."""
    module = name.removesuffix(".weight")
    own = [f"{name}_scale_inv", f"{name}_scale"]
    return own if module == name else [*own, f"{module}.scale", f"{module}.qscale_weight"]
