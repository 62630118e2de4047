"""Which column of which table shows which field of a report."""

from __future__ import annotations

import functools

from duat_cli.report.tables import compare as compare_table
from duat_cli.report.tables import inspect as table
from duat_cli.report.tables import lora as lora_table
from duat_cli.report.tables import verify as verify_table
from duat_cli.report.tables.grid import Column
from duat_cli.report.tables.prune import report as prune_table

_TABLES: dict[str, dict[str, list[Column]]] = {
    "inspect": table.TABLES,
    "verify": verify_table.TABLES,
    "compare": compare_table.TABLES,
    "lora-diff": lora_table.TABLES,
    "prune-bound": prune_table.TABLES,
}
_OF_TEXT = {  # tables that are more words than numbers
    ("attribute", "attribution[].parts.tokens[].value"): ["its own part"],
    ("attribute", "attribution[].direct.heads[].value"): ["direct"],
    ("attribute", "attribution[].direct.heads[].moved"): ["moved"],
    ("attribute", "attribution[].measured.heads[].change"): ["lost"],
    ("attribute", "attribution[].measured.tokens[].cut"): ["cut"],
    ("attribute", "attribution[].measured.tokens[].replaced"): ["replaced"],
    ("support", "entries[].relative_error"): ["rel. error"],
    ("matrix", "matrices[].density"): ["density"],
    ("matrix", "matrices[].expected_density"): ["expected"],
    ("matrix", "checks[].relative_error"): ["rel. error"],
}


@functools.cache
def headers() -> dict[tuple[str, str], list[str]]:
    """(report, path of the field) -> headers of the columns that show it."""
    found = dict(_OF_TEXT)
    for report, tables in _TABLES.items():
        for rows, columns in tables.items():
            for column in columns:
                names = found.setdefault((report, rows + column.path), [])
                names += [column.name] if column.name not in names else []
    return found
