"""Tolerances: a metric drifts unless |new - old| <= atol + rtol |old|.

Those of float32 allow for the BLAS of another machine, those of half precision for rounding the weights to it: a
rounded weight is off by up to 2^-8 of itself in bfloat16 and 2^-11 in float16. Eight-bit floats (2^-4) are beyond both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from duat_cli.checks.baseline import BEHAVIOUR, metric_of
from duat_cli.checks.paths import matches, place_of
from duat_cli.checks.policy import Layer, ToleranceTable
from duat_cli.results.behaviour import Behaviour

COARSENESS = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}

# relative distance of a tensor, from its sketch
_WEIGHTS = {"float64": 1e-5, "float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3}
# (rtol, atol) of numbers of the forward pass
_REPORT = {"float64": (1e-5, 1e-6), "float32": (1e-3, 1e-4), "float16": (1e-2, 2e-3), "bfloat16": (5e-2, 2e-2)}
# rtol of numbers of the model's answers, added to that
_BEHAVIOUR = 0.005


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float
    better: Literal["lower", "higher"] | None
    source: str

    def ends(self, old: float, slack: float) -> tuple[float, float]:
        """The least and the largest value within the tolerance. slack: amount that the metric's interval adds.

        Computed in decimals, as files and policies hold them: in binary 2.8897 + 0.002 is below 2.8917.
        """
        here, rtol, atol, more = (Decimal(repr(float(x))) for x in (old, self.rtol, self.atol, slack))
        room = atol + rtol * abs(here) + more
        return float(here - room), float(here + room)


def default_tolerance(key: str, dtype: str) -> Tolerance:
    """The tolerance of a metric for weights and arithmetic of that dtype."""
    source = f"tolerance of {dtype}"
    kind = metric_of(key).kind
    if kind == "tensor":
        return Tolerance(0.0, _WEIGHTS[dtype], None, source)
    if kind == "count":
        return Tolerance(0.0, 0.0, "lower", "counts are exact")
    rtol, atol = _REPORT[dtype]
    head, _, name = key.partition(".")
    if head == BEHAVIOUR:
        return Tolerance(_BEHAVIOUR + rtol, atol, place_of(name, Behaviour).meaning.better, f"0.5 % and {source}")
    meaning = place_of(key).meaning
    return Tolerance(rtol, 0.0 if meaning.drift == "norm" else atol, meaning.better, source)


def tolerance(key: str, dtype: str, own: Mapping[str, tuple[Layer, ToleranceTable]]) -> Tolerance:
    """The tolerance of a metric: the default, overridden by each pattern of the policy that matches, in order."""
    found = default_tolerance(key, dtype)
    for pattern, (layer, table) in own.items():
        if matches(pattern, key):
            found = Tolerance(
                found.rtol if table.rtol is None else table.rtol,
                found.atol if table.atol is None else table.atol,
                table.better or found.better,
                layer.source,
            )
    return found
