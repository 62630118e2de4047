"""GPTQ and AWQ: qweight, qzeros and scales in the place of a weight.

Source: AutoGPTQ's and GPTQModel's torch kernels; AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from duat_cli.loading.quantised.formula import WHOLE, Found, Tensor, UnfitError, UnknownFormatError, misshapen, require
from duat_cli.loading.quantised.grouped import Awq, Gptq, Grouped
from duat_cli.loading.quantised.numbers import words_of
from duat_cli.text import shown

_BITS = (2, 3, 4, 8)
_ADDED = {"gptq": 1, "gptq_v2": 0}  # number added to stored zero points


def gptq(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Found:
    """The weights of a checkpoint of quant_method gptq."""
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in _ADDED:
        raise UnknownFormatError(f"checkpoint_format {shown(layout)} of gptq; read are {' and '.join(_ADDED)}")

    def weight(module: str) -> Grouped:
        own = _of_module(config, module)
        stated = own.get("bits")
        name, zero, scale, order = (f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales", "g_idx"))
        words, outs = _matrix(tensors, name)
        fits = [b for b in _BITS if order in tensors and words_of(_length(tensors[order]), b) == words]
        bits = stated if stated in fits or order not in tensors else fits[0] if len(fits) == 1 else None
        if bits not in _BITS:
            raise UnfitError(
                name, f"expected numbers of {', '.join(map(str, _BITS))} bits; the config states {shown(stated)}"
            )
        inputs = words * 32 // bits
        groups = _groups(tensors, name, scale, outs)
        _require_stated(own, tensors, name, inputs, in_order=order not in tensors)
        reordered = bool(own.get("desc_act")) and groups > 1
        if order in tensors or reordered:
            require(tensors, name, order, (inputs,), WHOLE)
        require(tensors, name, zero, (groups, words_of(outs, bits)), ("I32",))
        return Gptq(
            shape=(outs, inputs),
            parts={"values": name, "scales": scale, "zeros": zero, **({"groups": order} if order in tensors else {})},
            dtypes={"values": "I32", "scales": tensors[scale].dtype, "zeros": "I32", "groups": "I32"},
            largest=float((1 << bits) - 1),
            outs_first=True,
            step=32,
            bits=bits,
            added=_ADDED[layout],
        )

    weights = _every(tensors, weight)
    bits = " or ".join(map(str, sorted({formula.bits for formula in weights.values()})))
    return Found(f"gptq ({bits} bits{_group_words(config)})", weights)


def _of_module(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The config of a module: `dynamic` of GPTQModel may change it for modules whose names begin with a pattern. The
    first pattern that fits counts."""
    dynamic = config.get("dynamic")
    for pattern, own in dynamic.items() if isinstance(dynamic, Mapping) else ():
        try:
            fits = re.match(str(pattern).removeprefix("+:"), module)
        except re.error as error:
            raise UnknownFormatError(f"dynamic {shown(pattern)} of gptq, no regular expression: {error}") from error
        if fits and isinstance(own, Mapping):
            return {**config, **own}
    return config


def awq(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Found:
    """The weights of a checkpoint of quant_method awq."""
    layout, bits = str(config.get("version") or config.get("format") or "gemm").lower(), config.get("bits", 4)
    if layout != "gemm" or bits != 4 or config.get("zero_point") is False:
        what = f"version {shown(layout)}, bits {shown(bits)}, zero_point {shown(config.get('zero_point'))}"
        raise UnknownFormatError(f"{what} of awq; read are version 'gemm', 4 bits and zero points")

    def weight(module: str) -> Grouped:
        name, zero, scale = (f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales"))
        inputs, words = _matrix(tensors, name)
        groups = _groups(tensors, name, scale, 8 * words)
        _require_stated(config, tensors, name, inputs)
        require(tensors, name, zero, (groups, words), ("I32",))
        return Awq(
            shape=(8 * words, inputs),
            parts={"values": name, "scales": scale, "zeros": zero},
            dtypes={"values": "I32", "scales": tensors[scale].dtype, "zeros": "I32"},
            largest=15.0,
            outs_first=True,
            step=8,
            bits=4,
        )

    weights = _every(tensors, weight)
    acts = [n for n in tensors if n.endswith(".scales") and f"{n.removesuffix('scales')}qweight" not in tensors]
    if acts:  # AutoAWQ divides an activation function's output by them, which no class of transformers does
        raise UnfitError(min(acts), "scales of an activation function, which are not supported")
    return Found(f"awq (4 bits{_group_words(config)})", weights)


def _every(tensors: Mapping[str, Tensor], weight: Callable[[str], Grouped]) -> dict[str, Grouped]:
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    return {f"{module}.weight": weight(module) for module in modules}


def _matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    held = tensors[name]
    if held.dtype != "I32" or len(held.shape) != 2 or 0 in held.shape:
        raise UnfitError(name, f"expected a matrix of I32, got {held.dtype} of {list(held.shape)}")
    return held.shape[0], held.shape[1]


def _groups(tensors: Mapping[str, Tensor], name: str, scale: str, outs: int) -> int:
    found = require(tensors, name, scale)
    if len(found.shape) != 2 or found.shape[1] != outs or not found.shape[0]:
        raise misshapen(tensors, name, scale, f"expected [groups, {outs}]")
    return found.shape[0]


def _require_stated(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, inputs: int, *, in_order: bool = True
) -> None:
    """UnfitError where the number of groups of scales is not what the config says; if it says nothing, groups must be
    equal. in_order: whether inputs are grouped in the order of their numbers, so that no group may be shorter."""
    scale, size = f"{name.removesuffix('qweight')}scales", config.get("group_size")
    groups = tensors[scale].shape[0]
    if not isinstance(size, int) or isinstance(size, bool) or size == 0:
        each = -(-inputs // groups)
    else:
        each = size if size > 0 else inputs
    shorter = in_order and groups > 1 and inputs % each
    if groups != -(-inputs // each) or shorter:
        raise misshapen(tensors, name, scale, f"expected one row for each {size} inputs")


def _group_words(config: Mapping[str, Any]) -> str:
    size = config.get("group_size")
    return f", groups of {size}" if isinstance(size, int) and size > 0 else ", a scale for each output"


def _length(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.shape else 0
