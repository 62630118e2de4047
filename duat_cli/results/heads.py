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
    ] = Field(description="mean over rows of the entropy of p_i")
    effective_context: Annotated[
        Finite | None, Meaning("tokens", "exact", formula=f"mean over rows i of 2^(entropy of p_i), {_P}")
    ] = Field(description="mean over rows of 2^entropy: how many tokens a row reads")
    mean_distance: Annotated[
        Finite | None, Meaning("tokens", "exact", formula=f"mean over rows i of sum_j p_ij |i - j|, {_P}")
    ] = Field(description="mean over rows of how far away the tokens are that a row reads")
    first_token_share: Annotated[
        Finite | None,
        replace(_SHARE, formula=f"mean over i >= 1 of p_i0, {_P}", source="attention sinks: Xiao et al. (2023)"),
    ] = Field(description="mean over the other rows of the share that the first token has; an attention sink if large")
    current_token_share: Annotated[Finite | None, replace(_SHARE, formula=f"mean over i >= 1 of p_ii, {_P}")] = Field(
        description="mean over the rows but the first, which may see nothing else, of the share that the row's own "
        "token has"
    )
    previous_token_share: Annotated[Finite | None, replace(_SHARE, formula=f"mean over i >= 1 of p_i(i-1), {_P}")] = (
        Field(description="mean over the rows but the first of the share that the token in front has")
    )
    duplicate_token_share: Annotated[Finite | None, _DUPLICATE] = Field(
        description="share of the tokens in front that are equal to the row's own, mean over the rows that see any; "
        f"{_OVER_KNOWN}"
    )
    induction_share: Annotated[Finite | None, _INDUCTION] = Field(
        description="share of the tokens that stand behind another occurrence of the row's own token, mean over the "
        f"rows that see any; {_OVER_KNOWN}. In a causal model these are the tokens that came next when the token was "
        "there before"
    )


class HeadAttended(Attended):
    """Statistics of what one head reads."""

    index: int = Field(description="number of the head, from 0")
    row_sum: Annotated[
        Finite, Meaning("sum of a row of H", "exact", formula="mean over rows i of sum_j H_ij", signed=True)
    ] = Field(
        description="1 of a softmax over the tokens; less where a sink or padding, which is no token, takes a part; "
        "anything where the mixer has no softmax"
    )


class Heads(WithReasons):
    """Statistics of what the heads of one block read, and the same for uniform attention."""

    each: Annotated[list[HeadAttended] | None, Meaning()] = Field(description="head by head, by query heads")
    uniform: Attended | None = Field(
        description="null: the same of H uniform over the tokens that a row may see: those that the mask leaves to it "
        "(without a mask, those that some head of the row reaches)"
    )
    duplicate_rows: Annotated[int | None, _ROWS] = Field(
        description="how many rows duplicate_token_share is a mean over, sum over the prompts"
    )
    induction_rows: Annotated[int | None, _ROWS] = Field(
        description="how many rows induction_share is a mean over, sum over the prompts"
    )
