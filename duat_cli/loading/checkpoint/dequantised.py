"""Quantised weights among the tensors of a checkpoint: found by config.json and headers, computed as they are read.

Each becomes a tensor with the name, shape and values that the model has, and other code sees nothing else of it. Only
numpy is needed, and only once a checkpoint is quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from duat_cli.loading.checkpoint.files import fail, open_file, read_into
from duat_cli.loading.checkpoint.headers import Made, TensorEntry
from duat_cli.loading.checkpoint.index import Merged
from duat_cli.loading.checkpoint.seal import Seal, require_unchanged
from duat_cli.text import clean, listed, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duat_cli.loading.quantised.formula import Formula
    from duat_cli.loading.quantised.numbers import Floats

QUANTISATION = ("quantization_config", "compression_config")
_METHODS = ("fp8", "fbgemm_fp8", "mxfp8", "mxfp4", "compressed-tensors", "gptq", "awq", "bitsandbytes")
_MLX = "which is not read: mlx_lm.convert --dequantize writes the checkpoint in full precision"
_PIECE = 1 << 17  # values that are computed at a time
_SMALL = 1 << 16  # most bytes of a tensor that describes how others are stored


def check_method(where: Path, field: str, value: object) -> None:
    """CheckpointError for a method that is not read."""
    method = method_of(value)
    if method in _METHODS:
        return
    if method is None and isinstance(value, dict) and {"bits", "group_size"} <= value.keys():
        fail(where, f"{clean(field)}: bits and group_size without a quant_method, as MLX has it, {_MLX}")
    what = "without a quant_method" if method is None else f"quant_method {shown(method)}"
    _refuse(where, field, f"{what}; read are {', '.join(_METHODS)}")


def method_of(value: object) -> object:
    """quant_method, or its equivalent from older versions of bitsandbytes."""
    if not isinstance(value, dict):
        return value
    if "quant_method" not in value and (value.get("load_in_8bit") or value.get("load_in_4bit")):
        return "bitsandbytes"
    return value.get("quant_method")


def dequantised(
    path: Path, stated: Sequence[tuple[str, Any]], merged: Merged
) -> tuple[dict[str, TensorEntry], str | None]:
    """(tensors, with each weight in the place of what it is quantised to; the quantisation in words). stated: the
    fields of config.json that state a quantisation.

    CheckpointError names what does not fit together.
    """
    if not stated:
        _refuse_unstated(path, merged.tensors)
        return merged.tensors, None
    if any(value != stated[0][1] for _, value in stated):
        fail(path / "config.json", f"{' and '.join(clean(field) for field, _ in stated)} differ: keep the right one")
    from duat_cli.loading.quantised.find import find
    from duat_cli.loading.quantised.formula import UnfitError, UnknownFormatError

    (field, config), stored, where = stated[0], merged.tensors, path / "config.json"
    method = method_of(config)

    def read(name: str) -> bytes:
        entry = stored[name]
        if entry.bytes > _SMALL:
            raise UnfitError(name, f"{entry.bytes} bytes, too large for what it is")
        return _raw(path, merged.seals, name, entry)

    try:
        found = find(method, config if isinstance(config, dict) else {}, stored, read)
    except UnknownFormatError as fault:
        _refuse(where, field, str(fault))
    except UnfitError as fault:
        entry = stored.get(fault.name)
        fail(path if entry is None else path / entry.shard, str(fault))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, re.error) as fault:
        fail(where, f"{clean(field)}: not as {shown(method)} writes it ({clean(str(fault))})")
    if not found.weights:
        fail(where, f"{clean(field)}: quantised weights (quant_method {shown(method)}), but the files hold "
                    "none: remove the field, or fetch the checkpoint again")  # fmt: skip
    gone = found.beside.union(*(formula.parts.values() for formula in found.weights.values()))
    rest = {name: entry for name, entry in stored.items() if name not in gone}
    twice = sorted(rest.keys() & found.weights.keys())
    if twice:
        fail(path / rest[twice[0]].shard, f"{listed(twice)}: stored both quantised and not: delete one of them")
    return rest | {name: _entry(formula, stored) for name, formula in found.weights.items()}, found.format


def pieces(path: Path, seals: Mapping[str, Seal], name: str, entry: TensorEntry) -> Iterator[tuple[int, Floats]]:
    """(number of the first row, values (rows, columns)) for each piece of a quantised weight, in order."""
    import numpy as np

    from duat_cli.loading.quantised.formula import UnfitError

    if entry.made is None:
        raise ValueError(f"{name} is stored as it is")
    formula, arrays = entry.made.formula, stored_parts(path, seals, entry.made)
    count, columns = formula.rows_and_columns
    height = max(formula.step, _PIECE // columns // formula.step * formula.step)
    for start in range(0, count, height):
        try:
            with np.errstate(all="ignore"):  # scales that are not finite are reported elsewhere
                values = formula.rows(arrays, start, min(start + height, count))
        except UnfitError as fault:  # a fault that headers do not show
            fail(path / entry.shard, str(fault))
        yield start, values


def stored_parts(
    path: Path, seals: Mapping[str, Seal], made: Made, roles: tuple[str, ...] | None = None
) -> dict[str, NDArray[Any]]:
    """Role -> the stored tensor, bit for bit. roles: the ones to read, all by default."""
    import numpy as np

    from duat_cli.loading.quantised.numbers import RAW

    found = {}
    for role, entry in made.parts.items():
        if roles is None or role in roles:
            raw = _raw(path, seals, made.formula.parts[role], entry)
            found[role] = np.frombuffer(raw, np.dtype(RAW[entry.dtype])).reshape(entry.shape)
    return found


def _refuse(where: Path, field: str, what: str) -> NoReturn:
    fail(where, f"{clean(field)}: quantised weights ({what}) are not supported; give the checkpoint in full precision: "
                "as it was before, or by model.dequantize() and save_pretrained of transformers, where it knows the "
                "format")  # fmt: skip


def _refuse_unstated(path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuses tensors that formats store in the place of a weight, if config.json states no quantisation: the weight
    itself would be missing."""
    for name, entry in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            fail(path / entry.shard, f"{shown(name)}: quantised as GPTQ and AWQ do it, but config.json has no "
                 "quantization_config: put the content of quantize_config.json there, with \"quant_method\": \"gptq\", "
                 "or fetch config.json again")  # fmt: skip
        if leaf == "weight" and entry.dtype == "U32" and f"{module}.scales" in tensors:
            fail(path / entry.shard, f"{shown(name)}: words of 32 bits beside their scales, as MLX has it, {_MLX}")


def _entry(formula: Formula, stored: Mapping[str, TensorEntry]) -> TensorEntry:
    parts = {role: stored[name] for role, name in formula.parts.items()}
    first = next(iter(parts.values()))
    size = sum(part.bytes for part in parts.values())
    return TensorEntry(formula.shape, formula.exact_in, first.shard, size, first.offset, Made(formula, parts))


def _raw(path: Path, seals: Mapping[str, Seal], name: str, entry: TensorEntry) -> bytes:
    """The bytes of a stored tensor."""
    shard, raw = path / entry.shard, bytearray(entry.bytes)
    require_unchanged(shard, seals[entry.shard], name)
    with open_file(shard) as file:
        read_into(shard, file, entry.offset, memoryview(raw), shown(name))
    require_unchanged(shard, seals[entry.shard], name)
    return bytes(raw)
