"""Repair of sets in the report of `duat prune-bound`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.meaning import Meaning

_BEFORE = Meaning("the metric's", "measured", how="the set taken out, nothing else changed", signed=True)
_AFTER = Meaning("the metric's", "measured", how="the set taken out of the repaired model", signed=True)
_SHARE = Meaning("share of prompts", "measured")
_RIDGE = Meaning(
    "mean square of a kept input",
    "given",
    how="the choice of eight that left least on prompts held back",
    formula="lambda K / tr(X_K^T X_K)",
    source="Hoerl & Kennard (1970)",
)
ShareOfKind = Annotated[
    Finite,
    Meaning("share, 0 to 1", "exact"),
    Field(description="share of all terms of its kind, or of its kinds together, that the set removes"),
]


class RepairedSet(Result):
    """One set under some prompts, without repair and with it."""

    removed: Annotated[int, Meaning("terms", "exact")] = Field(description="number of terms that the set removes")
    share: ShareOfKind
    prompts: Annotated[int, Meaning("prompts", "exact")] = Field(
        description="number of prompts that the set was run on, without repair and with it"
    )
    mean_before: Annotated[Finite, _BEFORE] = Field(
        description="damage of removing the set without repair, mean over the prompts"
    )
    mean_after: Annotated[Finite, _AFTER] = Field(
        description="damage of removing the set with repair, mean over the prompts"
    )
    percentile_90_before: Annotated[Finite, _BEFORE] = Field(
        description="damage of removing the set without repair that a tenth of the prompts exceed"
    )
    percentile_90_after: Annotated[Finite, _AFTER] = Field(
        description="damage of removing the set with repair that a tenth of the prompts exceed"
    )
    share_exceeded_before: Annotated[Finite, _SHARE] = Field(
        description="share of the prompts whose damage is above the budget, without repair"
    )
    share_exceeded_after: Annotated[Finite, _SHARE] = Field(
        description="share of the prompts whose damage is above the budget, with repair"
    )
    dropped: bool = Field(
        description="whether the repair was left out, both damages then being those without it: it did not lower the "
        "mean damage on the prompts that choose sets or, where calibration prompts are among these, fitted to each "
        "half of the calibration prompts on the other. A set that is only tried and above the budget is not fitted "
        "to halves"
    )


class SetRepair(WithReasons):
    """Refit of the layers that make up for a plan's set, and its effect."""

    calibration_prompts: int = Field(description="number of calibration prompts, which the layers were fitted to")
    calibration_tokens: int = Field(
        description="number of tokens of the calibration prompts, which the layers were fitted to"
    )
    calibration_sha256: str = Field(
        description="SHA-256 of the calibration prompts' own SHA-256 in hexadecimal, one a line, in their order"
    )
    refitted: int = Field(
        description="number of layers refitted for the plan's set: output projections of attention and last layers of "
        "FFNs"
    )
    unchanged: int = Field(
        description="number of layers left as they are, because every refit was worse on the prompts that were held "
        "back"
    )
    short: int = Field(description="number of layers with more kept inputs than there are calibration tokens")
    ridge_low: Annotated[Finite | None, _RIDGE] = Field(
        description="smallest ridge of a refitted layer; null where no layer was refitted"
    )
    ridge_high: Annotated[Finite | None, _RIDGE] = Field(
        description="largest ridge of a refitted layer; null where no layer was refitted"
    )
    chosen_on: list[RepairedSet] = Field(
        description="damage of the sets that were tried, without repair and with it, under the prompts that choose "
        "sets, which by default are the calibration prompts as well: repair looks better there than it is"
    )
    held_out: list[RepairedSet] = Field(
        description="damage of the sets that were tested, without repair and with it, under held-out prompts, which "
        "took part neither in choosing nor in fitting"
    )
