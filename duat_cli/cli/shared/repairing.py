"""The options of `duat prune-bound` about repair."""

from __future__ import annotations

from typing import Annotated

from duat_cli.cli.shared import options
from duat_cli.errors import InputError

Repair = Annotated[
    bool,
    options.compute_option(
        "--repair",
        help="Refit what is left by least squares to the dense model's outputs; budget, guarantee and --apply are then "
        "of the repaired model.",
    ),
]
Calibration = Annotated[
    str | None,
    options.input_option(
        "--calibration",
        metavar="FILE",
        show_default=False,
        help="Prompts that --repair fits to, as of --prompts. Default: the prompts of the report.",
    ),
]


def require_repair(calibration: str | None, repair: bool) -> None:
    """InputError where the one is given without the other."""
    if calibration is not None and not repair:
        raise InputError("--calibration: says what --repair is fitted to; give --repair as well")
