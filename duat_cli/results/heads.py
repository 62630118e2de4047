"""Statistics of what each attention head of one block reads, from its H alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from duat_cli.results.base import Finite, WithReasons
from duat_cli.results.meaning import Meaning

_P = "p_ij = |H_ij| / sum_j |H_ij|"
_SHARE = Meaning("share, 0 to 1", "exact")
_ROWS = Meaning("rows", "exact", over_prompts="sum")
_DUPLICATE = replace(
    _SHARE,
    formula=f"mean over rows i that see such a token of sum_j p_ij over j < i with t_j = t_i; {_P}",
    source="duplicate token heads: Wang et al. (2022)",
    over_prompts="known",
)
_INDUCTION = replace(
    _SHARE,
    formula=f"mean over rows i that see such a token of sum_j p_ij over j >= 1 with t_(j-1) = t_i, j - 1 != i; {_P}",
    source="prefix matching of induction heads: Olsson et al. (2022)",
    over_prompts="known",
)
_OVER_KNOWN = "mean over the prompts with such rows"


class Attended(WithReasons):
    """Statistics of what rows of H read, with p_ij = |H_ij| / sum_j |H_ij|; rows of zeros are left out of all means."""

    entropy_bits: Annotated[
        Finite | None, Meaning("bits", "exact", formula=f"mean over rows i of -sum_j p_ij log2 p_ij, {_P}")
    ] = Field(
        description="entropy of the shares p_ij that the tokens j have in what row i of H reads, mean over the rows"
    )
    effective_context: Annotated[
        Finite | None, Meaning("tokens", "exact", formula=f"mean over rows i of 2^(entropy of p_i), {_P}")
    ] = Field(
        description="number of tokens that a row of H reads in effect: 2^entropy of their shares p_ij, mean over the "
        "rows"
    )
    mean_distance: Annotated[
        Finite | None, Meaning("tokens", "exact", formula=f"mean over rows i of sum_j p_ij |i - j|, {_P}")
    ] = Field(
        description="distance |i - j| of the tokens j that row i of H reads, weighted by their shares p_ij, mean over "
        "the rows"
    )
    first_token_share: Annotated[
        Finite | None,
        replace(_SHARE, formula=f"mean over i >= 1 of p_i0, {_P}", source="attention sinks: Xiao et al. (2023)"),
    ] = Field(
        description="share that the first token has in what a row of H reads, mean over the other tokens' rows; an "
        "attention sink if large"
    )
    current_token_share: Annotated[Finite | None, replace(_SHARE, formula=f"mean over i >= 1 of p_ii, {_P}")] = Field(
        description="share that a row's own token has in what the row of H reads, mean over the rows but the first, "
        "which may see nothing else"
    )
    previous_token_share: Annotated[Finite | None, replace(_SHARE, formula=f"mean over i >= 1 of p_i(i-1), {_P}")] = (
        Field(
            description="share that the token in front has in what a row of H reads, mean over the rows but the first"
        )
    )
    duplicate_token_share: Annotated[Finite | None, _DUPLICATE] = Field(
        description="share that tokens in front which are equal to the row's own have in what a row of H reads, mean "
        f"over the rows that see any; {_OVER_KNOWN}"
    )
    induction_share: Annotated[Finite | None, _INDUCTION] = Field(
        description="share that tokens behind another occurrence of the row's own token have in what a row of H "
        f"reads, mean over the rows that see any; {_OVER_KNOWN}. In a causal model these are the tokens that came next "
        "when the token was there before"
    )


class HeadAttended(Attended):
    """Statistics of what one head reads."""

    index: int = Field(description="number of the head, from 0")
    row_sum: Annotated[
        Finite, Meaning("sum of a row of H", "exact", formula="mean over rows i of sum_j H_ij", signed=True)
    ] = Field(
        description="sum of a row of H, mean over the rows: 1 of a softmax over the tokens; less where a sink or "
        "padding, which is no token, takes a part; anything where the mixer has no softmax"
    )


class Heads(WithReasons):
    """Statistics of what the heads of one block read, and the same for uniform attention."""

    each: Annotated[list[HeadAttended] | None, Meaning()] = Field(
        description="statistics of what each head of the block reads, one entry a query head"
    )
    uniform: Attended | None = Field(
        description="null: statistics of what a row of H reads if H is uniform over the tokens that the row may see: "
        "those that the mask leaves to it (without a mask, those that some head of the row reaches)"
    )
    duplicate_rows: Annotated[int | None, _ROWS] = Field(
        description="number of rows of H that `duplicate_token_share` is a mean over, sum over the prompts"
    )
    induction_rows: Annotated[int | None, _ROWS] = Field(
        description="number of rows of H that `induction_share` is a mean over, sum over the prompts"
    )
