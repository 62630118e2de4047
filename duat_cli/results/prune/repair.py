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
    Finite, Meaning("share, 0 to 1", "exact"), Field(description="share that they are of the terms of this kind")
]


class RepairedSet(Result):
    """One set under some prompts, without repair and with it."""

    removed: Annotated[int, Meaning("terms", "exact")] = Field(description="how many terms are removed")
    share: ShareOfKind
    prompts: Annotated[int, Meaning("prompts", "exact")] = Field(description="how many prompts it was run on")
    mean_before: Annotated[Finite, _BEFORE] = Field(description="mean damage without repair")
    mean_after: Annotated[Finite, _AFTER] = Field(description="mean damage with repair")
    percentile_90_before: Annotated[Finite, _BEFORE] = Field(
        description="a tenth of the prompts have a larger damage without repair"
    )
    percentile_90_after: Annotated[Finite, _AFTER] = Field(
        description="a tenth of the prompts have a larger damage with repair"
    )
    share_exceeded_before: Annotated[Finite, _SHARE] = Field(
        description="share of the prompts that have a damage above the budget without repair"
    )
    share_exceeded_after: Annotated[Finite, _SHARE] = Field(description="the same with repair")
    dropped: bool = Field(
        description="whether the repair was left out, because it did not lower the mean damage on the prompts that "
        "choose sets, or one fitted to half of them not that on the other: then both damages are those without it; "
        "of a set that is only tried and above the budget as fitted to all, halves are not fitted"
    )


class SetRepair(WithReasons):
    """Refit of the layers that make up for a plan's set, and its effect."""

    calibration_prompts: int = Field(description="prompts that the layers were fitted to")
    calibration_tokens: int = Field(description="tokens of these prompts")
    calibration_sha256: str = Field(description="of these prompts' own sha256, one a line")
    refitted: int = Field(
        description="layers refitted for the plan's set: output projections of attention and last layers of FFNs"
    )
    unchanged: int = Field(
        description="layers left as they are, because every refit was worse on the prompts that were held back"
    )
    short: int = Field(description="layers with more kept inputs than there are calibration tokens")
    ridge_low: Annotated[Finite | None, _RIDGE] = Field(description="the smallest ridge of a layer")
    ridge_high: Annotated[Finite | None, _RIDGE] = Field(description="the largest ridge of a layer")
    chosen_on: list[RepairedSet] = Field(
        description="sets under the prompts that chose them, which by default are the calibration prompts as well: "
        "repair looks better here than it is"
    )
    held_out: list[RepairedSet] = Field(
        description="sets under held-out prompts, which took part neither in choosing nor in fitting"
    )
