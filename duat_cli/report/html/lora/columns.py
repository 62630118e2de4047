"""The columns of the tables over modules."""

from __future__ import annotations

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column

NORMS = (
    Column(("norm of the change", "of dW"), "frobenius_norm", numbers.plain),
    Column(("relative to the weight", "%"), "relative_frobenius", numbers.percent),
    Column(("spectral norm", "of dW"), "spectral_norm", numbers.plain),
    Column(("largest effect", "at one token"), "sup_local", numbers.plain),
)
RANKS = (
    Column(("stated rank", "directions"), "rank", numbers.whole),
    Column(("numerical rank", "directions"), "numerical_rank", numbers.whole),
    Column(("stable rank", "directions"), "stable_rank", numbers.plain),
    Column(("entropy rank", "directions"), "entropy_rank", numbers.plain),
    Column(("90 % of the energy", "directions"), "energy_rank_90", numbers.whole),
    Column(("spectral norm", "of dW"), "spectral_norm", numbers.plain),
    Column(("rounding alone", "of dW"), "rounding.floor", numbers.plain),
    Column(("above rounding", "directions"), "rounding.rank_above_floor", numbers.whole),
)
INTRUDERS = (
    Column(("intruders, output side", "vectors"), "intruders.output", numbers.whole),
    Column(("intruders, input side", "vectors"), "intruders.input", numbers.whole),
    Column(("looked at", "vectors"), "intruders.k", numbers.whole),
    Column(("alignment, output", "%"), "alignment.output", numbers.percent),
    Column(("null: random", "%"), "alignment.output_random", numbers.percent),
    Column(("alignment, input", "%"), "alignment.input", numbers.percent),
    Column(("null: random", "%"), "alignment.input_random", numbers.percent),
)
COMPARISON = (
    Column(("cosine", "-1 to 1"), "cosine", numbers.signed(numbers.plain)),
    Column(("distance", "of dW"), "distance", numbers.plain),
    Column(("relative distance", "0-1"), "relative_distance", numbers.plain),
)
