"""Eq. 16 with f the model itself, in the report of `duat prune-bound`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.kinds import Kind
from duat_cli.results.base import Finite, WithReasons
from duat_cli.results.meaning import Meaning

_COUNT = Meaning("prompts", "exact")
_TRIANGLE_END = Meaning("relative", "estimate", how="end of an interval")


class Eq16(WithReasons):
    """Eq. 16 for one set of terms or one whole part. Norms are taken at the last block's output, over all tokens,
    relative to that output's own norm; means over the prompts."""

    what: Literal["set", "part"] = Field(description="the chosen set of a plan, or one block, attention or FFN")
    name: str = Field(
        description="of a set its granularity, such as neuron; of a part its term, such as block.3.attention.0"
    )
    kind: Kind | None = Field(description="of a part; null for a set")
    block: int | None = Field(description="of a part: number of its block, from 0; null for a set")
    terms: Annotated[int, Meaning("terms", "exact")] = Field(description="how many terms are removed")
    bound: Annotated[
        Finite,
        Meaning(
            "relative",
            "exact",
            how="no bound on measured: dynamic parameters are held",
            formula="|sum over the set of T_L ... T_{j+1} term_j| / |x_L|, T of the blocks without the set",
            source="right-hand side of Eq. 16, f the model itself, so that epsilon is 0",
        ),
    ] = Field(description="norm of the vector sum of the removed terms, carried to the last block's output")
    triangle: Annotated[
        Finite,
        Meaning(
            "relative",
            "estimate",
            how="exact for up to 64 terms; of more, about 64 and two of every block at least are drawn for every "
            "prompt, each with a probability that grows with its size where it stands",
            formula="sum over the set of |T_L ... T_{j+1} term_j| / |x_L|",
            source="Eq. 16 with the triangle inequality; Hansen & Hurwitz (1943)",
        ),
    ] = Field(description="sum of the norms of the carried terms: at least the bound")
    triangle_low: Annotated[Finite, _TRIANGLE_END] = Field(
        description="at the report's confidence; triangle itself where every term was carried"
    )
    triangle_high: Annotated[Finite, _TRIANGLE_END] = Field(description="upper end of that interval")
    held: Annotated[
        Finite,
        Meaning(
            "relative",
            "exact",
            how="another way to bound, equal to it up to rounding",
            formula="|x_L - x_L of the frozen blocks run without the set| / |x_L|",
        ),
    ] = Field(
        description="change with dynamic parameters held: H, the scales of norms, routing, gates, and what every "
        "nonlinearity that stays gives"
    )
    error: Annotated[
        Finite,
        Meaning(
            "relative",
            "measured",
            formula="max over prompts of |x_L - (x_L without the set, all held + the carried sum)| / |x_L|",
            better="lower",
        ),
    ] = Field(description="how far held and bound are from being the same vector: part of the report's certificate")
    measured: Annotated[
        Finite | None, Meaning("relative", "measured", formula="|x_L - x_L of the model without the set| / |x_L|")
    ] = Field(description="change of the last block's output with the set really removed, everything reacting")
    ratio: Annotated[Finite | None, Meaning("factor", "measured", formula="measured / bound")] = Field(
        description="of the means; above 1 the bound, which is of fixed parameters, does not hold"
    )
    ratio_largest: Annotated[Finite | None, Meaning("factor", "measured", formula="max over prompts")] = Field(
        description="the largest of the prompts' own ratios"
    )
    exceeded: Annotated[int | None, _COUNT] = Field(
        description="prompts for which measured is larger than bound by more than the certificate's tolerance"
    )
    prompts: Annotated[int, _COUNT] = Field(description="prompts that this was computed on")
