"""What the scales of quantised weights are: few numbers, each of which stands in front of many weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duat_cli.loading.checkpoint.dequantised import stored_parts
from duat_cli.loading.checkpoint.dtypes import stated_dtype
from duat_cli.loading.checkpoint.preflight import CheckpointFiles

_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


@dataclass(frozen=True)
class ScaleFacts:
    """The scales of one weight."""

    name: str
    """Of the tensor that holds them."""
    count: int
    nonfinite: int
    zero: int
    """None are counted where the format gives a block of zeros the scale zero."""
    beyond: int
    """Finite ones that make a weight larger than any number of the dtype that the weights had."""
    dtype: str
    """That dtype, as config.json states it."""


def scale_facts(files: CheckpointFiles) -> dict[str, ScaleFacts]:
    """Quantised weight -> its scales; they are read once more, a small part of the files."""
    dtype = stated_dtype(files) or "float32"
    limit, found = _LARGEST.get(dtype, np.inf), {}
    for name, entry in files.tensors.items():
        if entry.made is None or not entry.elements:
            continue
        formula = entry.made.formula
        scales = formula.factors(stored_parts(files.path, files.seals, entry.made, formula.scales)).astype(np.float64)
        finite = np.isfinite(scales)
        found[name] = ScaleFacts(
            name=formula.parts[formula.scales[0]],
            count=scales.size,
            nonfinite=int((~finite).sum()),
            zero=0 if formula.zero_blocks else int((scales == 0).sum()),
            beyond=int((np.abs(scales[finite]) * formula.largest > limit).sum()),
            dtype=dtype,
        )
    return found
