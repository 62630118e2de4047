"""The statistics of cross-attention's operator W'_c, which leads from an encoder's tokens to a decoder's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from duat_cli.results.base import Finite, WithReasons
from duat_cli.results.meaning import Meaning
from duat_cli.results.operator import PROOF

_HEADS = Meaning(
    "Kronecker products, 1 to the number of heads",
    "exact",
    formula="exp(-sum_k p_k ln p_k), p_k = s_k^2 / sum s^2; s_k^2 the eigenvalues of K G",
    source="Eq. 5-10; Kronecker spectrum by Van Loan & Pitsianis (1993)",
)
_ALIKE = Meaning("0 to 1", "exact", formula="sqrt(mean over pairs of nonzero blocks of cos^2(B_ik, B_jl))")
_FULL = Meaning("share, 0 to 1", "exact", formula="share of pairs of entries that some head and channel connects")
_BITS = Meaning("bits", "exact", formula="mean over rows i of -sum_k p_ik log2 p_ik, p_ik = C_ik^2 / sum_k C_ik^2")
_CONTEXT = Meaning("encoder tokens", "exact", formula="mean over rows i of 2^(entropy of p_i)")
_BY_NORM = "by C_ik = |B_ik|_F, from encoder token k to decoder token i"
_WEIGHTED = "by |B_ik e_k|, e_k the encoder's state of token k"


class CrossStats(WithReasons):
    """What does not depend on how large the weights are."""

    effective_heads: Annotated[Finite | None, _HEADS] = Field(
        description="exp of the entropy of the squared Kronecker spectrum: 1 to heads; compare its null"
    )
    block_correlation: Annotated[Finite | None, _ALIKE] = Field(
        description="root mean square cosine over all pairs of nonzero blocks; compare its null"
    )
    entropy_bits: Annotated[Finite | None, _BITS] = Field(description=_BY_NORM)
    effective_context: Annotated[Finite | None, _CONTEXT] = Field(
        description=f"how many encoder tokens reach a decoder token, {_BY_NORM}"
    )
    weighted_entropy_bits: Annotated[Finite | None, _BITS] = Field(description=_WEIGHTED)
    weighted_effective_context: Annotated[Finite | None, _CONTEXT] = Field(
        description=f"how many encoder tokens reach a decoder token, {_WEIGHTED}"
    )


class CrossOperator(WithReasons):
    """W'_c of one block, N M rows and K width columns, never built; N decoder and K encoder tokens.

    Encoder tokens have no place on the decoder's axis, so it has no diagonal, no distances and no first token.
    """

    rows: Annotated[Finite, Meaning("entries", "exact", formula="N M")] = Field(description="N M")
    columns: Annotated[Finite, Meaning("entries", "exact", formula="K width")] = Field(
        description="K times the width of the encoder's states"
    )
    frobenius_norm: Annotated[
        Finite | None,
        Meaning(
            "norm of W'_c",
            "exact",
            formula="sqrt(sum_hk K_hk G_hk), K_hk = <H_h, H_k>, G_hk = <A_h, A_k>",
            source="Eq. 5-10; <H (x) A, K (x) B> = <H, K> <A, B>",
        ),
    ] = Field(description="|W'_c|_F, the root of the sum of the squares of all entries")
    structural_density: Annotated[Finite | None, _FULL] = Field(
        description="share of the entries that are not identically zero, by the zeros of the mask, V and O; 1 where "
        "these have none, for a decoder token may read every encoder token"
    )
    stats: CrossStats | None = Field(description="what training may have made of it; null where W'_c has no factors")
    uniform: CrossStats | None = Field(
        description="the same where nothing was learned to attend to: every H uniform over the encoder's tokens, "
        "weights and scales the same"
    )
    certificate_error: Annotated[
        Finite | None,
        Meaning("relative", "measured", formula=PROOF, source="Eq. 10", better="lower", over_prompts="largest"),
    ] = Field(description="largest relative residual of the proof that W'_c e is what cross-attention adds")
