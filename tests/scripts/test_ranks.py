"""The table of how well criteria rank terms, from reports made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.ranks import OURS, columns, section


def one(value: float) -> Any:
    return SimpleNamespace(value=value, low=value - 0.1, high=value + 0.1)


def prediction(kind: str, own: float, others: dict[str, Any], ratio: float = 1.0, worst: float = 1.0) -> Any:
    return SimpleNamespace(
        granularity=kind, n=9, spearman=one(own), criteria=others, median_ratio=one(ratio), worst_ratio=worst
    )


def test_the_best_of_every_column_is_bold_and_whole_parts_are_told_of() -> None:
    first = [
        prediction("head", 0.9, {"wanda": one(0.95), "taylor": None}),
        prediction("neuron", 0.8, {"wanda": one(0.2), "taylor": one(0.3)}, ratio=0.97),
        prediction("block", 0.1, {}, worst=26.4),
        prediction("ffn", 0.1, {}, worst=3.0),
    ]
    reports: Any = {"demo": SimpleNamespace(prediction=first)}
    assert list(columns(reports)) == ["demo, 9 neurons", "demo, 9 heads"]
    lines = section(reports).splitlines()
    assert f"| {OURS} | **0.800** (0.700 to 0.900) | 0.900 (0.800 to 1.000) |" in lines
    assert "| wanda | 0.200 (0.100 to 0.300) | **0.950** (0.850 to 1.050) |" in lines
    assert "| taylor | 0.300 (0.200 to 0.400) | - |" in lines
    assert "| median of predicted / measured | 0.97 | 1.00 |" in lines
    assert lines[-1].endswith("by a factor of up to 26.4 on the demo.")
