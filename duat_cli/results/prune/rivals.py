"""Sets that other criteria choose, in the report of `duat prune-bound --criteria`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import Finite, WithReasons
from duat_cli.results.meaning import Meaning
from duat_cli.results.prune.terms import ABLATED, COUNT

Allocation = Literal["one order", "same share of layers", "uniform"]

_RATIO = Meaning(
    "factor",
    "measured",
    how="on the held-out prompts, both sets under each of them; null where duat's set does no damage there",
    formula="mean damage / mean damage of duat's set of the same size",
)
_RATIO_END = Meaning(
    "factor",
    "estimate",
    how="of prompts alone; of random sets, for those that were drawn",
    formula="percentile bootstrap over the prompts, both sets under the same ones, with --confidence",
    source="Efron (1979)",
)


class CriterionSet(WithReasons):
    """Effect of removing a set chosen by a criterion, on prompts that played no part in choosing it."""

    beside: Annotated[int, COUNT] = Field(
        description="size of duat's own set that a criterion's set stands beside: the plan's, or the middle one of "
        "those tested"
    )
    criterion: Annotated[
        str,
        Meaning(
            source="magnitude; activation x norm; wanda (Sun et al. 2023); taylor (Molchanov et al. 2019); shortgpt "
            "(Men et al. 2024)"
        ),
    ] = Field(description="what chose the set: duat, one of the criteria of `prediction`, or random")
    allocation: Allocation = Field(
        description="how a criterion's scores became a set: all terms in one order, of several kinds by score a "
        "parameter; the same share of every layer, as of a criterion that compares terms of one layer; or as "
        "--uniform takes them"
    )
    sets: Annotated[int, Meaning("sets", "exact")] = Field(
        description="number of sets that the criterion has: 1, of random ones how many were drawn"
    )
    removed: Annotated[int, COUNT] = Field(
        description="number of terms that the criterion's set removes; of random sets their mean"
    )
    parameters: Annotated[
        int, Meaning("parameters", "exact", how="as near to those of duat's set as whole terms allow")
    ] = Field(
        description="number of parameters that the terms of the criterion's set hold, counted as in the plan; of "
        "random sets their mean"
    )
    prompts: Annotated[int, Meaning("prompts", "exact")] = Field(
        description="number of held-out prompts, all of which the criterion's set was run on"
    )
    mean: Annotated[Finite, ABLATED] = Field(
        description="mean damage of the criterion's set over the held-out prompts; of random sets over all"
    )
    percentile_90: Annotated[Finite, ABLATED] = Field(
        description="damage of the criterion's set that a tenth of the held-out prompts exceed; of random sets, of all "
        "sets under all prompts"
    )
    lowest: Annotated[Finite | None, ABLATED] = Field(
        description="smallest mean damage of one of several random sets; null of a single set"
    )
    highest: Annotated[Finite | None, ABLATED] = Field(
        description="largest mean damage of one of several random sets; null of a single set"
    )
    ratio: Annotated[Finite | None, _RATIO] = Field(
        description="mean damage of the criterion's set over that of duat's own set beside it"
    )
    ratio_low: Annotated[Finite | None, _RATIO_END] = Field(description="lower end of the interval of `ratio`")
    ratio_high: Annotated[Finite | None, _RATIO_END] = Field(description="upper end of the interval of `ratio`")
