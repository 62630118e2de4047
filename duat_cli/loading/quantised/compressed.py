"""compressed-tensors: eight-bit numbers with their scales, or integers of few bits packed in words of 32 bits.

Source: the library's `dequantize` and `unpack_from_int32`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from duat_cli.loading.quantised.formula import (
    FLOATS,
    WHOLE,
    Formula,
    Found,
    Tensor,
    UnfitError,
    UnknownFormatError,
    leaf_of,
    misshapen,
    require,
)
from duat_cli.loading.quantised.grouped import Packed
from duat_cli.loading.quantised.numbers import words_of
from duat_cli.loading.quantised.scaled import scaled
from duat_cli.text import shown

Read = Callable[[str], bytes]
"""A function that returns the bytes of a small tensor."""
Scheme = Mapping[str, Any]
"""The config's scheme for the weights of a group of modules."""

_PLAIN = ("naive-quantized", "int-quantized", "float-quantized")
_PACKED = "pack-quantized"
_NOTHING = "dense"  # the format of weights that are stored as they are
_COMPRESSED = ("weight_packed", "weight_scale")  # tensors in the place of a quantised weight, or beside it
_VALUES = ("I8", "F8_E4M3", "F8_E5M2")
_REORDERED = ("group", "dynamic", True)  # values of actorder for which the group of each input is stored
# scales of activations and caches, which are not quantised here
_BESIDE = frozenset({
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point",
})  # fmt: skip


def compressed(config: Mapping[str, Any], tensors: Mapping[str, Tensor], read: Read) -> Found:
    """The weights of a checkpoint of quant_method compressed-tensors."""
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    formats = sorted({str(g.get("format") or config.get("format")) for g in groups} or {str(config.get("format"))})
    unknown = [name for name in formats if name not in (*_PLAIN, _PACKED)]
    sparse = config.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
        unknown.append(str(sparse["format"]))
    if config.get("transform_config"):
        unknown.append("transform_config")
    if unknown == [_NOTHING] and not any(leaf_of(name) in _COMPRESSED for name in tensors):
        return Found("", {})
    if unknown:
        raise UnknownFormatError(
            f"format {shown(unknown[0])} of compressed-tensors; read are {', '.join((*_PLAIN, _PACKED))}"
        )
    groups = [g for g in groups if isinstance(g.get("weights"), Mapping)]
    weights = dict(_weights(tensors, read, groups))
    kinds = sorted({_words(group["weights"]) for group in groups})
    beside = {name for name in tensors if leaf_of(name) in _BESIDE}
    shapes = {name for name in tensors if name.endswith(".weight_shape") and f"{name[:-6]}_packed" in tensors}
    return Found(f"compressed-tensors {', '.join(formats)} ({'; '.join(kinds)})", weights, frozenset(beside | shapes))


def _words(scheme: Scheme) -> str:
    """The scheme in words, such as "int4, groups of 128"."""
    each = scheme.get("strategy") or "tensor"
    over = f"groups of {scheme.get('group_size')}" if each == "group" else f"a scale for each {each}"
    if each == "block":
        over = " or ".join(f"blocks of {m} x {n}" for m, n in _blocks([scheme]))
    return f"{scheme.get('type', 'int')}{scheme.get('num_bits', 8)}, {over}"


def _schemes(groups: Sequence[Mapping[str, Any]], module: str) -> list[Scheme]:
    """The schemes that may hold for the module: those of its name, else those of a class, else all."""
    named, others = list[Scheme](), list[Scheme]()
    for group in groups:
        targets = [str(target) for target in group.get("targets") or ()]
        if any(_names(target, module) for target in targets):
            named.append(group["weights"])
        elif any("." not in target and not target.startswith("re:") for target in targets):
            others.append(group["weights"])
    return named or others or [group["weights"] for group in groups]


def _names(target: str, module: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module


def _blocks(schemes: Sequence[Scheme]) -> list[tuple[int, int]]:
    """Rows and columns that share a scale, for each scheme that has groups or blocks."""
    found = []
    for scheme in schemes:
        size = scheme.get("block_structure")
        if scheme.get("strategy") == "group":
            found.append((1, int(scheme["group_size"])))
        elif size is not None:
            rows, columns = map(int, size.split("x") if isinstance(size, str) else size)
            found.append((rows, columns))
    return found


def _zero_points(tensors: Mapping[str, Tensor], name: str, zero: str, schemes: Sequence[Scheme]) -> bool:
    """Whether the weight has zero points; UnfitError where the config says otherwise."""
    symmetric = {scheme.get("symmetric", True) is not False for scheme in schemes}
    if symmetric == {True} and zero in tensors:
        raise UnfitError(zero, f"zero points of {shown(name)}, which is symmetric by the config")
    if symmetric == {False}:
        require(tensors, name, zero, dtypes=(*FLOATS, *WHOLE, *_VALUES))
    return zero in tensors


def _weights(
    tensors: Mapping[str, Tensor], read: Read, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Formula]]:
    for name, tensor in tensors.items():
        schemes = _schemes(groups, name.rpartition(".")[0])
        if name.endswith(".weight_packed"):
            yield f"{name.removesuffix('_packed')}", _packed(tensors, name, read, schemes)
        elif name.endswith(".weight"):
            scale, order = f"{name}_scale", f"{name}_g_idx"
            if tensor.dtype not in _VALUES or 0 in tensor.shape:
                if scale in tensors:
                    raise UnfitError(name, f"stored as {tensor.dtype} beside its scales, not compressed: save it "
                                           "compressed, or without quantization_config")  # fmt: skip
                continue
            if order in tensors:
                raise UnfitError(order, "the order of groups of a weight that is not packed is not supported")
            zero = f"{name}_zero_point"
            given = zero if _zero_points(tensors, name, zero, schemes) else None
            yield name, scaled(tensors, name, scale, zero=given, blocks=_blocks(schemes))


def _packed(tensors: Mapping[str, Tensor], name: str, read: Read, schemes: Sequence[Scheme]) -> Packed:
    own = name.removesuffix("_packed")
    scale, zero, order = (f"{own}_{leaf}" for leaf in ("scale", "zero_point", "g_idx"))
    held = tensors[name]
    outs, inputs = _shape(tensors, name, f"{own}_shape", read)
    stated = {int(s.get("num_bits", 8)) for s in schemes}
    bits = next((b for b in sorted(stated) if held.shape == (outs, words_of(inputs, b)) and 0 < b <= 8), None)
    if held.dtype != "I32" or bits is None:
        asked = " or ".join(map(str, sorted(stated))) or "no number of"
        raise UnfitError(name, f"{held.dtype} of {list(held.shape)} does not hold [{outs}, {inputs}] in {asked} bits")
    found = require(tensors, name, scale)
    sides = (*found.shape, 1, 1)[:2]
    groups = sides[1]
    whole = found.shape in ((), (1,), (1, 1))
    if not whole and (len(found.shape) > 2 or sides[0] != outs or not groups or inputs % groups):
        raise misshapen(tensors, name, scale, f"expected [{outs}, groups]")
    sizes = {s.get("group_size") for s in schemes if s.get("strategy") == "group"}
    if groups > 1 and inputs // groups not in sizes:
        raise misshapen(tensors, name, scale, f"groups of {sorted(map(str, sizes))} by the config")
    parts = {"values": name, "scales": scale}
    if _zero_points(tensors, name, zero, schemes):
        require(tensors, name, zero, (words_of(outs, bits), groups), ("I32",))
        parts["zeros"] = zero
    reordered = groups > 1 and all(s.get("actorder") in _REORDERED for s in schemes)
    if order in tensors or reordered:
        require(tensors, name, order, (inputs,), WHOLE)
        parts["groups"] = order
    return Packed(
        shape=(outs, inputs),
        parts=parts,
        dtypes={role: tensors[part].dtype for role, part in parts.items()},
        largest=float(1 << bits - 1) * (2 if "zeros" in parts else 1),
        step=32,
        bits=bits,
    )


def _shape(tensors: Mapping[str, Tensor], name: str, shape: str, read: Read) -> tuple[int, int]:
    """(out, in) of a packed weight, from the tensor that states it."""
    found = require(tensors, name, shape, dtypes=WHOLE)
    size = {"I64": 8, "I32": 4}.get(found.dtype)
    if size is None or found.shape != (2,):
        raise misshapen(tensors, name, shape, "expected two numbers, out and in")
    raw = read(shape)
    outs, inputs = (int.from_bytes(raw[k * size : (k + 1) * size], "little", signed=True) for k in (0, 1))
    if outs <= 0 or inputs <= 0:
        raise UnfitError(shape, f"expected two sizes, got {outs} and {inputs}")
    return outs, inputs
