"""bitsandbytes, as saved: 4 bits that index a table of sixteen numbers, and 8 bits with a scale a row.

    4 bits: W = table[Q] absmax[block]; doubly quantised, absmax = table2[A] absmax2[block] + offset
    8 bits: W = CB SCB[row] / 127

Source: the library's `dequantize_4bit`, `dequantize_blockwise` and `int8_vectorwise_dequant`; QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from duat_cli.loading.quantised.formula import FLOATS, Arrays, Formula, Found, Tensor, UnfitError, missing, require
from duat_cli.loading.quantised.numbers import RAW, Floats, by_pairs, floats, pairs_of
from duat_cli.loading.quantised.scaled import scaled
from duat_cli.text import shown

Read = Callable[[str], bytes]
_STORAGE = ("U8", "I8", "BF16", "F16", "F32")  # dtypes that the bytes may be stored as
_STATE = ".quant_state.bitsandbytes__"
_PER_127 = 7.874015718698502e-3  # 1 / 127 as the library has it


@dataclass(frozen=True, kw_only=True)
class FourBit(Formula):
    """Four-bit codes with scales by blocks. Roles: values, table, scales; doubly quantised also inner_table,
    inner_scales."""

    block: int
    inner_block: int
    offset: float

    def rows(self, arrays: Arrays, start: int, stop: int) -> Floats:
        width = self.shape[-1]
        first, last = start * width, stop * width
        table = floats(arrays["table"], self.dtypes["table"])
        held = arrays["values"].reshape(-1).view(np.uint8)[first // 2 : -(-last // 2)]
        values = by_pairs(pairs_of(table, lower_first=False), held)[first % 2 : first % 2 + last - first]
        blocks = np.arange(first // self.block, -(-last // self.block))
        each = np.repeat(self._scales(arrays, blocks), self.block)
        skipped = first - int(blocks[0]) * self.block
        return (values * each[skipped : skipped + values.size]).reshape(stop - start, width)

    def _scales(self, arrays: Arrays, blocks: np.ndarray) -> Floats:
        chosen = arrays["scales"].reshape(-1)[blocks]
        if not self.inner_block:
            return floats(chosen, self.dtypes["scales"])
        inner = floats(arrays["inner_scales"].reshape(-1)[blocks // self.inner_block], self.dtypes["inner_scales"])
        return floats(arrays["inner_table"], self.dtypes["inner_table"])[chosen] * inner + np.float32(self.offset)


def bitsandbytes(tensors: Mapping[str, Tensor], read: Read) -> Found:
    """The weights of a checkpoint that bitsandbytes has quantised."""
    weights: dict[str, Formula] = {}
    beside: set[str] = set()
    kinds: set[str] = set()
    for name, tensor in tensors.items():
        own, found, kind = name.partition(_STATE)
        if found:
            weights[own], told = _four_bit(tensors, own, name, kind, read)
            beside.add(name)
            kinds.add(told)
        elif name.endswith(".weight") and tensor.dtype == "I8" and 0 not in tensor.shape:
            module = name.removesuffix("weight")
            require(tensors, name, f"{module}SCB", tensor.shape[:1])
            rows = scaled(tensors, name, f"{module}SCB", times=_PER_127)
            weights[name] = replace(rows, outs_first=True, zero_blocks=True)
            beside.add(f"{module}weight_format")
            _require_rows(tensors, f"{module}weight_format", read)
            kinds.add("int8, a scale for each row")
    lost = [n for n, t in tensors.items() if n.endswith(".weight") and n not in weights and _looks_packed(t)]
    if lost:
        raise missing(tensors, min(lost), f"{min(lost)}{_STATE}nf4")
    return Found(f"bitsandbytes ({'; '.join(sorted(kinds))})", weights, frozenset(beside & set(tensors)))


def _looks_packed(tensor: Tensor) -> bool:
    return tensor.dtype == "U8" and len(tensor.shape) == 2 and tensor.shape[1] == 1


def _require_rows(tensors: Mapping[str, Tensor], name: str, read: Read) -> None:
    """Refuses weights whose values are not stored by rows, but in the order that a GPU of 2020 wanted."""
    if name in tensors and any(read(name)):
        raise UnfitError(name, "values are not stored by rows, which is not supported: save the model again")


def _four_bit(tensors: Mapping[str, Tensor], name: str, state: str, kind: str, read: Read) -> tuple[FourBit, str]:
    said = _state(state, read)
    if name not in tensors:
        raise UnfitError(state, f"the state of {shown(name)}, which is missing: fetch the checkpoint again")
    shape, block = said.get("shape"), said.get("blocksize")
    if not (isinstance(shape, list) and shape and all(map(_is_size, shape)) and _is_size(block)):
        raise UnfitError(state, f"shape {shown(shape)} and blocksize {shown(block)} are no sizes")
    count, held = math.prod(shape), require(tensors, name, name, dtypes=_STORAGE)
    stored = math.prod(held.shape) * np.dtype(RAW[held.dtype]).itemsize
    if stored != -(-count // 2):
        raise UnfitError(name, f"{stored} bytes do not hold {shape} in 4 bits: expected {-(-count // 2)}")
    blocks = -(-count // block)
    parts = {"values": name, "scales": f"{name}.absmax", "table": f"{name}.quant_map"}
    require(tensors, name, parts["table"], (16,))
    inner, offset = said.get("nested_blocksize"), said.get("nested_offset", 0.0)
    require(tensors, name, parts["scales"], (blocks,), FLOATS if inner is None else ("U8",))
    if inner is not None:
        if not _is_size(inner) or not isinstance(offset, (int, float)):
            raise UnfitError(state, f"nested_blocksize {shown(inner)} and nested_offset {shown(offset)} are no numbers")
        parts |= {"inner_scales": f"{name}.nested_absmax", "inner_table": f"{name}.nested_quant_map"}
        require(tensors, name, parts["inner_table"], (256,))
        require(tensors, name, parts["inner_scales"], (-(-blocks // inner),))
    double = "" if inner is None else ", doubly quantised"
    return FourBit(
        shape=tuple(shape),
        parts=parts,
        dtypes={role: tensors[part].dtype for role, part in parts.items()},
        scales=("scales",) if inner is None else ("inner_scales",),
        largest=1.0,
        outs_first=True,
        zero_blocks=True,
        block=block,
        inner_block=inner or 0,
        offset=float(offset),
    ), f"{kind}, blocks of {block}{double}"


def _state(name: str, read: Read) -> dict[str, Any]:
    try:
        said = json.loads(read(name).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnfitError(name, "holds no JSON, which says how the weight is quantised: corrupt?") from error
    if not isinstance(said, dict):
        raise UnfitError(name, "holds no JSON object, which says how the weight is quantised: corrupt?")
    return said


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 2**40
