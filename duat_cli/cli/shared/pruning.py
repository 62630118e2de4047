"""Options of `duat prune-bound`: which sets are wanted, and whether what is left is repaired."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from duat_cli.cli.shared import options
from duat_cli.errors import InputError

Uniform = Annotated[
    bool,
    options.compute_option(
        "--uniform",
        help="Sets take as many neurons of every FFN, and as many key and value heads, with the heads that use them, "
        "of every attention: then all of them can leave the file.",
    ),
]
Remove = Annotated[
    str | None,
    options.compute_option(
        "--remove",
        metavar="SHARE",
        show_default=False,
        help="The set that holds this share of the blocks' parameters, such as 20%, or of all of the model's: 20%/all. "
        "In place of the largest within the budget.",
    ),
]
Rounds = Annotated[
    int,
    options.compute_option(
        "--rounds",
        metavar="K",
        min=1,
        help="Sketch the model again after each of K parts of the set is gone, and show what that brings over one.",
    ),
]

EffortOption = Annotated[
    Literal["quick", "default", "thorough"],
    options.compute_option(
        "--effort",
        metavar="HOW",
        help="quick: fewer probes, ablations and tested sets, prompts that choose sets cut to 384 tokens together (by "
        "default 768), no certified bounds. thorough: more of each. --probes and --measure go before it.",
    ),
]


def parse_remove(text: str | None) -> tuple[float | None, bool]:
    """A share, and whether it is of all parameters."""
    if text is None:
        return None, False
    share, _, whole = text.strip().partition("/")
    try:
        value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if whole not in ("", "all") or text.strip().endswith("/") or not 0 < value < 1:
        raise InputError(
            f"--remove '{text}': expected a share of the blocks' parameters such as 20%, or of all: 20%/all"
        )
    return value, whole == "all"


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
