"""The columns of tables over blocks, and the choice of those that fit a page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, Labels, fits
from duat_cli.report.tables.page import Page
from duat_cli.results.base import Result
from duat_cli.results.inspect import InspectReport


def for_blocks(rows: Sequence[Result], labels: Labels, report: InspectReport, page: Page) -> list[list[Column]]:
    """Groups of columns, one table each; a single group, with optional columns as far as they fit, if all fit."""
    groups = [_ESSENTIAL, SPECTRUM] if _has_spectrum(report) else [_ESSENTIAL]
    wanted = frozenset[str]().union(*groups)
    if not fits(rows, labels, _columns(wanted, report), page):
        return [_columns(group, report) for group in groups]
    for path in _OPTIONAL:
        if fits(rows, labels, _columns(wanted | {path}, report), page):
            wanted |= {path}
    return [_columns(wanted, report)]


def every(report: InspectReport) -> list[Column]:
    """All columns that a page with enough room shows."""
    spectrum = SPECTRUM if _has_spectrum(report) else frozenset()
    return _columns(_ESSENTIAL | spectrum | {*_OPTIONAL}, report)


def for_pre_activation(report: InspectReport | None = None) -> list[Column]:
    """Columns of the parts at the FFN's first linear layer; if a report is given, only of parts that it has."""
    return [
        Column((part, "%"), f"terms.pre_activation.{part}.share", numbers.percent)
        for part in ("linear", "static", "encoder", "dynamic")
        if part != "encoder" or report is None or has_encoder(report)
    ]


def for_tokens(report: InspectReport | None = None) -> list[Column]:
    """Columns of the parts at a typical token; if a report is given, only of parts that it has."""
    absent = frozenset[str]() if report is None or has_encoder(report) else {_ENCODER}
    medians = [
        replace(
            column,
            path=column.path.replace(".share", ".token_median"),
            long=(f"{(column.long or column.title)[0]} at a typical token", "%"),
        )
        for column in COLUMNS
        if column.path.startswith("terms.") and column.path not in absent
    ]
    largest = Column(("largest", "token", "%"), "terms.largest_token", numbers.percent, ("largest token", "%"))
    return [*medians, largest]


def of_one_token(report: InspectReport) -> bool:
    """Whether the shares of some block are those of a token with more than half of the squared norm, and are other than
    a typical token's."""
    return any(
        block.terms.largest_token is not None
        and block.terms.largest_token > 0.5
        and any(
            part.share is not None and part.token_median is not None and abs(part.share - part.token_median) > 0.05
            for part in (block.terms.linear, block.terms.static, block.terms.dynamic, block.terms.own)
        )
        for block in report.blocks
    )


def has_encoder(report: InspectReport) -> bool:
    """Whether the report has an encoder part: that of a decoder's encoder states, or of features of pictures."""
    return any(block.terms.encoder is not None for block in report.blocks)


def _columns(wanted: Collection[str], report: InspectReport) -> list[Column]:
    absent = frozenset[str]() if has_encoder(report) else {_ENCODER}
    scale = heads_of(report)
    return [scaled(column, scale) for column in COLUMNS if column.path in wanted and column.path not in absent]


def heads_of(report: InspectReport) -> str:
    """The scale of effective heads: the model's number of heads or, where gates or mixers beside attention give blocks
    other numbers, the range over blocks."""
    found = [block.operator.kronecker_products for block in report.blocks]
    known = sorted({products for products in found if products is not None}) or [report.model.heads]
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def scaled(column: Column, heads: str) -> Column:
    """The column with the number of heads filled into its scale."""
    return replace(column, title=(*column.title[:-1], column.title[-1].format(heads=heads)))


def _has_spectrum(report: InspectReport) -> bool:
    return any(block.operator.spectral_norm is not None for block in report.blocks)


_ENCODER = "terms.encoder.share"
COLUMNS = (
    Column(("eff.", "heads", "/{heads}"), "operator.effective_heads", numbers.plain),
    Column(("corr.", "0-1"), "operator.block_correlation", numbers.plain),
    Column(("Frobenius", "norm", "of W'"), "operator.frobenius_norm", numbers.plain),
    Column(("spectral", "norm", "of W'"), "operator.spectral_norm", numbers.plain),
    Column(("stable", "rank", "dims"), "operator.stable_rank", numbers.plain, ("stable rank", "dimensions")),
    Column(("struct.", "density", "%"), "density.structural", numbers.percent, ("structural density", "%")),
    Column(("dens.", "%"), "density.numerical", numbers.percent, ("density", "%")),
    Column(("off-", "diag", "%"), "coupling.off_diagonal_share", numbers.percent, ("off-diagonal", "%")),
    Column(("context", "tokens"), "coupling.effective_context", numbers.plain),
    Column(("weighted", "context", "tokens"), "coupling_weighted.effective_context", numbers.plain),
    Column(("entropy", "bits"), "coupling.entropy_bits", numbers.plain),
    Column(("mean", "distance", "tokens"), "coupling.mean_distance", numbers.plain),
    Column(("distance", "deviation", "tokens"), "coupling.distance_deviation", numbers.plain),
    Column(("first", "token", "%"), "coupling.first_token_share", numbers.percent),
    Column(("linear", "%"), "terms.linear.share", numbers.percent),
    Column(("static", "%"), "terms.static.share", numbers.percent),
    Column(("enc.", "%"), _ENCODER, numbers.percent, ("encoder", "%")),
    Column(("dyn.", "%"), "terms.dynamic.share", numbers.percent, ("UAT terms", "%")),
    Column(("own", "%"), "terms.own.share", numbers.percent, ("of these the block's own", "%")),
    Column(("error", "rel."), "certificate_error", numbers.error),
)
"""All columns, in order."""
SPECTRUM = frozenset({"operator.frobenius_norm", "operator.spectral_norm", "operator.stable_rank"})
_OPTIONAL = (  # added in this order, as far as they fit
    "coupling.mean_distance",
    "coupling_weighted.effective_context",
    "coupling.first_token_share",
    "density.structural",
    "operator.frobenius_norm",
    "coupling.entropy_bits",
    "coupling.distance_deviation",
)
_ESSENTIAL = frozenset(column.path for column in COLUMNS) - SPECTRUM - {*_OPTIONAL}
