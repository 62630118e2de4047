"""The columns of the tables over blocks, by their full names."""

from __future__ import annotations

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column

SHARES = (
    Column(("linear", "%"), "terms.linear.share", numbers.percent),
    Column(("static", "%"), "terms.static.share", numbers.percent),
    Column(("encoder", "%"), "terms.encoder.share", numbers.percent),
    Column(("UAT terms", "%"), "terms.dynamic.share", numbers.percent),
    Column(("of these the block's own", "%"), "terms.own.share", numbers.percent),
    Column(("norm of the linear part", "of the output's"), "terms.linear.norm", numbers.plain),
    Column(("norm of the static part", "of the output's"), "terms.static.norm", numbers.plain),
    Column(("norm of the UAT part", "of the output's"), "terms.dynamic.norm", numbers.plain),
)
OPERATOR = (
    Column(("Frobenius norm", "of W'"), "operator.frobenius_norm", numbers.plain),
    Column(("spectral norm", "of W'"), "operator.spectral_norm", numbers.plain),
    Column(("stable rank", "dimensions"), "operator.stable_rank", numbers.plain),
    Column(("structural density", "%"), "density.structural", numbers.percent),
    Column(("density", "%"), "density.numerical", numbers.percent),
    Column(("density, from", "%"), "density.numerical_low", numbers.percent),
    Column(("density, to", "%"), "density.numerical_high", numbers.percent),
    Column(("off-diagonal", "%"), "coupling.off_diagonal_share", numbers.percent),
    Column(("context", "tokens"), "coupling.effective_context", numbers.plain),
    Column(("weighted context", "tokens"), "coupling_weighted.effective_context", numbers.plain),
    Column(("entropy", "bits"), "coupling.entropy_bits", numbers.plain),
    Column(("mean distance", "tokens"), "coupling.mean_distance", numbers.plain),
    Column(("distance deviation", "tokens"), "coupling.distance_deviation", numbers.plain),
    Column(("first token", "%"), "coupling.first_token_share", numbers.percent),
)
CERTIFICATE = (
    Column(("certificate error", "relative"), "certificate_error", numbers.error),
    Column(("error of W' factors", "relative"), "operator.certificate_error", numbers.error),
    Column(("largest activation", "as stored"), "range.largest_activation", numbers.plain),
    Column(("of the dtype's largest", "%"), "range.share", numbers.percent),
)
