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

    what: Literal["set", "part"] = Field(
        description="whether Eq. 16 is for the chosen set of a plan (set), or for one block, attention or FFN (part)"
    )
    name: str = Field(
        description="name of what Eq. 16 is for: a set's granularity, such as neuron, or a part's term, such as "
        "block.3.attention.0"
    )
    kind: Kind | None = Field(
        description="kind of the part that Eq. 16 is for: block, attention or ffn; null for a set"
    )
    block: int | None = Field(description="number of the block of the part that Eq. 16 is for, from 0; null for a set")
    terms: Annotated[int, Meaning("terms", "exact")] = Field(description="number of terms that are removed")
    bound: Annotated[
        Finite,
        Meaning(
            "relative",
            "exact",
            how="no bound on measured: dynamic parameters are held",
            formula="|sum over the set of T_L ... T_{j+1} term_j| / |x_L|, T of the blocks without the set",
            source="right-hand side of Eq. 16, f the model itself, so that epsilon is 0",
        ),
    ] = Field(
        description="norm of the vector sum of the removed terms, carried to the last block's output, relative to that "
        "output; mean over the prompts"
    )
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
    ] = Field(
        description="sum of the norms of the removed terms, each carried to the last block's output, relative to that "
        "output, mean over the prompts; at least `bound`, but for the sampling"
    )
    triangle_low: Annotated[Finite, _TRIANGLE_END] = Field(
        description="lower end of the interval of `triangle`, at the report's confidence; `triangle` itself where "
        "every term was carried"
    )
    triangle_high: Annotated[Finite, _TRIANGLE_END] = Field(
        description="upper end of the interval of `triangle`, at the report's confidence"
    )
    held: Annotated[
        Finite,
        Meaning(
            "relative",
            "exact",
            how="another way to bound, equal to it up to rounding",
            formula="|x_L - x_L of the frozen blocks run without the set| / |x_L|",
        ),
    ] = Field(
        description="change of the last block's output without the terms where dynamic parameters are held (H, the "
        "scales of norms, routing, gates, and what every nonlinearity that stays gives), relative to that output; "
        "mean over the prompts"
    )
    error: Annotated[
        Finite,
        Meaning(
            "relative",
            "measured",
            formula="max over prompts of |x_L - (x_L without the set, all held + the carried sum)| / |x_L|",
            better="lower",
        ),
    ] = Field(
        description="distance between the two vectors whose norms are `held` and `bound`, relative to the last block's "
        "output, largest over the prompts; it counts for the report's certificate"
    )
    measured: Annotated[
        Finite | None, Meaning("relative", "measured", formula="|x_L - x_L of the model without the set| / |x_L|")
    ] = Field(
        description="change of the last block's output with the terms really removed, everything reacting, relative to "
        "that output; mean over the prompts"
    )
    ratio: Annotated[Finite | None, Meaning("factor", "measured", formula="measured / bound")] = Field(
        description="ratio of the means `measured` and `bound`; above 1 the bound, which is of fixed parameters, does "
        "not hold"
    )
    ratio_largest: Annotated[Finite | None, Meaning("factor", "measured", formula="max over prompts")] = Field(
        description="largest ratio of `measured` and `bound` under a single prompt"
    )
    exceeded: Annotated[int | None, _COUNT] = Field(
        description="number of prompts under which `measured` is larger than `bound` by more than the certificate's "
        "tolerance"
    )
    prompts: Annotated[int, _COUNT] = Field(description="number of prompts that Eq. 16 was computed on")
