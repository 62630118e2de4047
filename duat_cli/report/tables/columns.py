"""The columns of the tables over blocks, and which of them a page has room for."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, Labels, fits
from duat_cli.report.tables.page import Page
from duat_cli.results.base import Result
from duat_cli.results.inspect import Block, InspectReport, PromptBlock

Titles = dict[str, tuple[str, ...]]

BLOCK = Labels(("block",), lambda row: str(row.index) if isinstance(row, Block) else "")
PROMPT = Labels(("prompt",), lambda row: str(row.prompt) if isinstance(row, PromptBlock) else "")


def for_blocks(rows: Sequence[Result], labels: Labels, report: InspectReport, page: Page) -> list[list[Column]]:
    """Groups of columns, each a table; one group, with what more there is room for, if all fit."""
    groups = [_ESSENTIAL, _SPECTRUM] if _has_spectrum(report) else [_ESSENTIAL]
    wanted = {path: title for group in groups for path, title in group.items()}
    if not fits(rows, labels, _columns(wanted, report), page):
        return [_columns(group, report) for group in groups]
    for path, title in _OPTIONAL.items():
        more = {**wanted, path: title}
        if fits(rows, labels, _columns(more, report), page):
            wanted = more
    return [_columns(wanted, report)]


def every(report: InspectReport) -> list[Column]:
    """All columns that a wide enough page has."""
    spectrum = _SPECTRUM if _has_spectrum(report) else {}
    return _columns({**_ESSENTIAL, **spectrum, **_OPTIONAL}, report)


def named() -> list[Column]:
    """All columns by their headers, whatever the report; what they hold of their rows is not asked for."""
    titles = _ESSENTIAL | _SPECTRUM | _OPTIONAL
    return [Column(titles[path], path, _form(path, titles[path][-1])) for path in _ORDER]


def for_pre_activation() -> list[Column]:
    """The three parts at the FFN's first linear layer."""
    return [
        Column((part, "%"), f"terms.pre_activation.{part}.share", numbers.percent)
        for part in ("linear", "static", "dynamic")
    ]


def _columns(wanted: Titles, report: InspectReport) -> list[Column]:
    return [_column(path, wanted[path], report) for path in _ORDER if path in wanted]


def _column(path: str, title: tuple[str, ...], report: InspectReport) -> Column:
    scale = title[-1].format(heads=report.model.heads)
    return Column((*title[:-1], scale), path, _form(path, scale))


def _form(path: str, scale: str) -> numbers.Form:
    if scale == "%":
        return numbers.percent
    return numbers.error if path.endswith("error") else numbers.plain


def _has_spectrum(report: InspectReport) -> bool:
    return any(block.operator.spectral_norm is not None for block in report.blocks)


# path in the report -> header; the last line is the unit or the scale
_ESSENTIAL: Titles = {
    "operator.effective_heads": ("eff.", "heads", "/{heads}"),
    "operator.block_correlation": ("corr.", "0-1"),
    "density.numerical": ("dens.", "%"),
    "coupling.off_diagonal_share": ("off-", "diag", "%"),
    "coupling.effective_context": ("context", "tokens"),
    "terms.linear.share": ("linear", "%"),
    "terms.static.share": ("static", "%"),
    "terms.dynamic.share": ("dyn.", "%"),
    "terms.own.share": ("own", "%"),
    "certificate_error": ("error", "rel."),
}
_SPECTRUM: Titles = {
    "operator.frobenius_norm": ("Frobenius", "norm", "of W'"),
    "operator.spectral_norm": ("spectral", "norm", "of W'"),
    "operator.stable_rank": ("stable", "rank", "dims"),
}
_OPTIONAL: Titles = {  # the first that fit
    "coupling.mean_distance": ("mean", "distance", "tokens"),
    "coupling_weighted.effective_context": ("weighted", "context", "tokens"),
    "coupling.first_token_share": ("first", "token", "%"),
    "density.structural": ("struct.", "density", "%"),
    "operator.frobenius_norm": ("Frobenius", "norm", "of W'"),
    "coupling.entropy_bits": ("entropy", "bits"),
    "coupling.distance_deviation": ("distance", "deviation", "tokens"),
}
_ORDER = (
    "operator.effective_heads",
    "operator.block_correlation",
    "operator.frobenius_norm",
    "operator.spectral_norm",
    "operator.stable_rank",
    "density.structural",
    "density.numerical",
    "coupling.off_diagonal_share",
    "coupling.effective_context",
    "coupling_weighted.effective_context",
    "coupling.entropy_bits",
    "coupling.mean_distance",
    "coupling.distance_deviation",
    "coupling.first_token_share",
    "terms.linear.share",
    "terms.static.share",
    "terms.dynamic.share",
    "terms.own.share",
    "certificate_error",
)
