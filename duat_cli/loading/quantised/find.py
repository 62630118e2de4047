"""The quantised weights of a checkpoint, as its config says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from duat_cli.loading.quantised.bitsandbytes import bitsandbytes
from duat_cli.loading.quantised.compressed import compressed
from duat_cli.loading.quantised.formula import Found, Tensor, UnknownFormatError
from duat_cli.loading.quantised.fp8 import fp8
from duat_cli.loading.quantised.gptq import awq, gptq
from duat_cli.loading.quantised.mxfp4 import mxfp4
from duat_cli.text import shown


def find(
    method: object, config: Mapping[str, Any], tensors: Mapping[str, Tensor], read: Callable[[str], bytes]
) -> Found:
    """The quantised weights. read: a function that returns the bytes of a small tensor.

    UnknownFormatError for a method or a variant that is not read, UnfitError where the tensors do not fit together.
    """
    if method in ("fp8", "fbgemm_fp8", "mxfp8"):
        return fp8(config, tensors)
    if method == "mxfp4":
        return mxfp4(tensors)
    if method == "compressed-tensors":
        return compressed(config, tensors, read)
    if method == "gptq":
        return gptq(config, tensors)
    if method == "awq":
        return awq(config, tensors)
    if method == "bitsandbytes":
        return bitsandbytes(tensors, read)
    raise UnknownFormatError(f"quant_method {shown(method)}")
