"""The options of `duat prune-bound` about repair."""

from __future__ import annotations

from typing import Annotated

import typer

from duat_cli.cli.shared import options

Repair = Annotated[
    bool,
    typer.Option(
        "--repair",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Refit what is left by least squares to the dense model's outputs; budget, guarantee and --apply are then "
        "of the repaired model.",
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        show_default=False,
        rich_help_panel=options.PANEL_INPUT,
        help="Prompts that --repair fits to, as of --prompts. Default: the prompts of the report.",
    ),
]
