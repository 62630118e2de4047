"""`duat schema`."""

from __future__ import annotations

from typing import Literal

import typer

from duat_cli.cli.shared import options
from duat_cli.cli.shared.presentation import Target
from duat_cli.errors import EXIT_SOUND

Report = Literal[
    "attribute",
    "check",
    "compare",
    "explain",
    "inspect",
    "lora-diff",
    "matrix",
    "matrix --network",
    "plan",
    "prune-bound",
    "support",
    "verify",
]


def schema(
    report: Report = typer.Argument(
        "inspect",
        metavar="REPORT",
        help="The command that writes the report: attribute, check, compare, explain, inspect, lora-diff, matrix, "
        "'matrix --network', plan, prune-bound, support or verify.",
    ),
    output: str | None = options.Page.output,
) -> int:
    """The JSON Schema of a report: every field with its meaning and unit."""

    target = Target.of_text("--output", output)
    from duat_cli.report.schema import to_schema

    target.write(to_schema(report))
    return EXIT_SOUND
