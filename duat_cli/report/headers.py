"""The headers of the columns that show each field of a report."""

from __future__ import annotations

import functools
from collections.abc import Callable

from duat_cli.report.tables import compare as compare_table
from duat_cli.report.tables import inspect as table
from duat_cli.report.tables import lora as lora_table
from duat_cli.report.tables import verify as verify_table
from duat_cli.report.tables.attribute import columns as attribute_columns
from duat_cli.report.tables.grid import Column
from duat_cli.report.tables.prune import report as prune_table

_TABLES: dict[str, dict[str, list[Column]]] = {
    "attribute": attribute_columns.TABLES,
    "inspect": table.TABLES,
    "verify": verify_table.TABLES,
    "compare": compare_table.TABLES,
    "lora-diff": lora_table.TABLES,
    "prune-bound": prune_table.TABLES,
}
_OF_TEXT = {  # columns of tables that are not made from `Column`
    ("attribute", "attribution[].parts.tokens[].value"): ["its own part"],
    ("attribute", "attribution[].parts.units[].tokens"): ["UAT terms at it"],
    ("support", "entries[].relative_error"): ["rel. error"],
    ("matrix", "matrices[].density"): ["density"],
    ("matrix", "matrices[].expected_density"): ["expected"],
    ("matrix", "checks[].relative_error"): ["rel. error"],
}


@functools.cache
def headers() -> dict[tuple[str, str], list[str]]:
    """(report, path of the field) -> headers of the columns that show it."""
    return _headers(lambda column: column.name)


@functools.cache
def printed() -> dict[tuple[str, str], list[str]]:
    """(report, path of the field) -> headers with the units below them."""
    return _headers(lambda column: " ".join(filter(None, column.header)))


def _headers(text: Callable[[Column], str]) -> dict[tuple[str, str], list[str]]:
    found = {place: list(titles) for place, titles in _OF_TEXT.items()}
    for report, tables in _TABLES.items():
        for rows, columns in tables.items():
            for column in columns:
                names, title = found.setdefault((report, rows + column.path), []), text(column)
                names += [title] if title not in names else []
    return found
