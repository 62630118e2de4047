"""Statistics of the attention operator W' of one block and of cross-attention's W'_c, and their nulls, in which nothing
was learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.meaning import Meaning

_OF_EQ_10 = "of the W' of Eq. 10; its Kronecker form is duat's"
PROVED = Meaning(
    "relative",
    "measured",
    formula="the larger of |W' x' - what attention adds| / |the latter| and of the residuals of fitting V, O and the "
    "scales",
    source="Eq. 10",
)
_PROVED_LARGEST = replace(PROVED, better="lower", over_prompts="largest")
_INTERVAL_END = Meaning("share, 0 to 1", "estimate", how="end of an interval", source="Wilson (1927)")
_EQUAL = "end of the 95 % interval of `numerical`; equal to `numerical` where that is exact"
_IntervalLow = Annotated[Finite | None, _INTERVAL_END, Field(description=f"lower {_EQUAL}")]
_IntervalHigh = Annotated[Finite | None, _INTERVAL_END, Field(description=f"upper {_EQUAL}")]
_OF_A_NULL = Field(description="null of the block's statistic of this name: that of a W' in which nothing was learned")
_HEADS = Meaning(
    "Kronecker products, 1 to the number of heads",
    "exact",
    formula="exp(-sum_k p_k ln p_k), p_k = s_k^2 / sum s^2; s_k^2 the eigenvalues of K G, K_hk = <H_h S, H_k S>, "
    "G_hk = <A_h, A_k>",
    source=f"{_OF_EQ_10}; Kronecker spectrum by Van Loan & Pitsianis (1993)",
)
_ALIKE = Meaning(
    "0 to 1",
    "exact",
    formula="sqrt(mean over pairs of nonzero blocks, each with itself included, of cos^2(B_ik, B_jl))",
)
_FULL = Meaning("share, 0 to 1", "exact", formula="share of pairs of entries that some head and channel connects")
_BITS = Meaning("bits", "exact", formula="mean over rows i of -sum_k p_ik log2 p_ik, p_ik = C_ik^2 / sum_k C_ik^2")
_CONTEXT = Meaning("encoder tokens", "exact", formula="mean over rows i of 2^(entropy of p_i)")
_SHARES = "the tokens' shares in what W'_c brings to a token, mean over the latter, by"
_BY_NORM = f"{_SHARES} C_ik = |B_ik|_F, from token k (in a decoder, of the encoder) to token i"
_WEIGHTED = f"{_SHARES} |B_ik e_k|, e_k what W'_c reads of token k (in a decoder, the encoder's state)"


class OperatorStats(WithReasons):
    """The frozen attention operator W' of one block, an NM x NM matrix that is never built."""

    rows: Annotated[Finite, Meaning("entries", "exact", formula="N M")] = Field(description="number of rows of W', N M")
    columns: Annotated[Finite, Meaning("entries", "exact", formula="N M, or N times the values' width")] = Field(
        description="number of columns of W': N M, or N times the values' width where W' reads a mixer's own values"
    )
    dense_bytes: Annotated[
        Finite, Meaning("bytes", "exact", formula="rows times columns times the bytes of one number")
    ] = Field(description="bytes that W' would take as a dense matrix of the run's dtype")
    frobenius_norm: Annotated[
        Finite | None,
        Meaning(
            "norm of W'",
            "exact",
            formula="sqrt(sum_hk K_hk G_hk), K_hk = <H_h S, H_k S>, G_hk = <A_h, A_k>",
            source=f"{_OF_EQ_10}; <H (x) A, K (x) B> = <H, K> <A, B>",
            drift="norm",
        ),
    ] = Field(description="|W'|_F, the root of the sum of the squares of all entries")
    spectral_norm: Annotated[
        Finite | None,
        Meaning(
            "norm of W'",
            "estimate",
            how="relative error at most 1e-3",
            formula="sigma_1(W')",
            source="Golub-Kahan-Lanczos on products with W'",
            needs="spectrum",
            drift="norm",
        ),
    ] = Field(description="largest singular value of W', by Lanczos: relative error <= 1e-3; with --spectrum")
    stable_rank: Annotated[
        Finite | None,
        Meaning(
            "dimensions",
            "estimate",
            how="from spectral_norm",
            formula="|W'|_F^2 / sigma_1(W')^2",
            needs="spectrum",
            drift="number",
        ),
    ] = Field(description="stable rank of W', (`frobenius_norm` / `spectral_norm`)^2; with --spectrum")
    effective_heads: Annotated[
        Finite | None, replace(_HEADS, unit="Kronecker products, 1 to kronecker_products", drift="number")
    ] = Field(
        description="number of Kronecker products that W' acts like, from 1 to `kronecker_products`: exp of the "
        "entropy of its squared Kronecker spectrum; compare its nulls"
    )
    block_correlation: Annotated[
        Finite | None,
        Meaning(
            "0 to 1",
            "exact",
            how="a block counts as much as any other however small it is, unless all heads round it to 0 in the run's "
            "dtype (scores some 100 below a row's largest, 17 in float16): if it is that sharp, dtypes differ",
            formula="sqrt(mean over pairs of nonzero blocks, each with itself included, of cos^2(B_ij, B_kl)), "
            "B_ij = (sum_h (H_h S)[i,j] A_h)^T",
            source="the paper calls the elements of W'_HVO highly correlated (section 4.2); this puts a number on it",
            drift="number",
        ),
    ] = Field(
        description="root mean square cosine over all pairs of nonzero blocks B_ij, each with itself included: at most "
        "1 (all alike), at least 1 over the root of their number, so that a short prompt reads higher; near 1 without "
        "any training, because softmax rows are positive: compare its nulls"
    )
    kronecker_products: Annotated[
        int | None,
        Meaning(
            "Kronecker products",
            "exact",
            formula="heads, each once for every token that a value is made of; times min(N, d) where a gate scales the "
            "channels of heads by token",
            over_prompts="largest",
        ),
    ] = Field(default=None, description="number of Kronecker products in the sum W': the most `effective_heads` can be")
    certificate_error: Annotated[Finite | None, _PROVED_LARGEST] = Field(
        description="largest relative residual of the proof that the factors V, O and H are the model's own"
    )


class Density(WithReasons):
    """Density of W'. A causal W' is block triangular: no entry leads to a token from a later one."""

    structural: Annotated[
        Finite | None,
        Meaning(
            "share, 0 to 1",
            "exact",
            how="what a mask leaves counts where a softmax rounds to 0, too (scores some 100 below the largest, 17 in "
            "float16); where no mask is seen, H of zero scores shows what that is; of windows, H as computed, without "
            "what is below 1e-30, as behind a mask of -100",
            formula="share of pairs of entries that some head and channel connects; (N+1)/2N where H is causal and V, "
            "O have no zeros",
            source='the paper has "a dense matrix (almost devoid of zero elements" (section 4.2), which a causal mask '
            "does not leave",
            drift="number",
        ),
    ] = Field(
        description="share of the entries of W' that are not identically zero, by the zeros of H, V and O: the union "
        "over heads and channels, block by block"
    )
    numerical: Annotated[
        Finite | None,
        Meaning(
            "share, 0 to 1",
            "estimate",
            how="counted up to 2^22 entries; above, from at most 2,048 sampled ones with a 95 % Wilson interval",
            formula="share of entries with |w| > threshold |W'|_F / (N M)",
            drift="number",
        ),
    ] = Field(
        description="share of the entries of W' above `threshold` times their root mean square, by absolute value"
    )
    numerical_low: _IntervalLow
    numerical_high: _IntervalHigh
    threshold: Annotated[
        Finite, Meaning("root mean square entries of W'", "given", formula="--threshold", over_prompts="same")
    ] = Field(description="what an entry must exceed to count in `numerical`: 0.01 unless --threshold says otherwise")
    linear_reference: Annotated[Finite, Meaning("share, 0 to 1", "exact", formula="1 / N")] = Field(
        description="density of a linear layer as transformers uses it, I_N (x) W: 1/N, N the number of tokens"
    )
    linear_reference_paper: Annotated[Finite, Meaning("share, 0 to 1", "exact", formula="1 / M")] = Field(
        description="density of a linear layer in the paper's orientation, W (x) I_M: 1/M, M the hidden size"
    )
    conv1d_reference: Annotated[
        Finite,
        Meaning(
            "share, 0 to 1",
            "exact",
            formula="pairs (i, j) with j in the window of i, over N^2",
            source="the comparison of section 4.1 and appendix C",
        ),
    ] = Field(description="density of a 1-D convolution of width `conv_width` over N tokens, zero padded")
    conv_width: Annotated[int, Meaning("tokens", "given", over_prompts="same")] = Field(
        description="width of the convolution of `conv1d_reference`, from --conv-width"
    )


class Coupling(WithReasons):
    """Coupling of tokens through W', with p_ij = C_ij^2 / sum_j C_ij^2."""

    off_diagonal_share: Annotated[
        Finite | None, Meaning("share, 0 to 1", "exact", formula="1 - sum_i C_ii^2 / sum_ij C_ij^2", drift="number")
    ] = Field(description="share of the coupling, as sum of C_ij^2, that leads from one token to another")
    entropy_bits: Annotated[
        Finite | None,
        Meaning(
            "bits",
            "exact",
            formula="mean over rows i of -sum_j p_ij log2 p_ij, p_ij = C_ij^2 / sum_j C_ij^2",
            drift="number",
        ),
    ] = Field(description="entropy of the shares p_ij of tokens j in what reaches token i, mean over i")
    effective_context: Annotated[
        Finite | None, Meaning("tokens", "exact", formula="mean over rows i of 2^(entropy of p_i)", drift="number")
    ] = Field(description="number of tokens that reach a token: 2^(entropy of their shares p_ij), mean over i")
    mean_distance: Annotated[
        Finite | None, Meaning("tokens", "exact", formula="mean over rows i of sum_j p_ij |i - j|", drift="number")
    ] = Field(description="distance of tokens j that reach token i, weighted by their shares p_ij, mean over i")
    distance_deviation: Annotated[Finite | None, Meaning("tokens", "exact")] = Field(
        description="standard deviation over tokens i of sum_j p_ij |i-j|, p_ij = C_ij^2 / sum_j C_ij^2: 0 where all "
        "are reached from equally far, sqrt((N^2-1)/12) where from the first token alone; compare its nulls"
    )
    first_token_share: Annotated[
        Finite | None, Meaning("share, 0 to 1", "exact", formula="mean over i >= 1 of p_i0", drift="number")
    ] = Field(description="share that the first token has in what reaches another token, mean over the other tokens")


class NullOperator(WithReasons):
    """Statistics of a null's W' that do not depend on the scale of the weights."""

    effective_heads: Annotated[
        Finite | None, Meaning("Kronecker products, 1 to the number of heads", "exact"), _OF_A_NULL
    ]
    block_correlation: Annotated[Finite | None, Meaning("0 to 1", "exact"), _OF_A_NULL]


class NullDensity(WithReasons):
    """Density of a null's W', by the same threshold as the model's."""

    structural: Annotated[Finite | None, Meaning("share, 0 to 1", "exact"), _OF_A_NULL]
    numerical: Annotated[
        Finite | None,
        Meaning("share, 0 to 1", "estimate", how="counted or sampled, as of the model itself"),
        _OF_A_NULL,
    ]
    numerical_low: _IntervalLow
    numerical_high: _IntervalHigh


class NullStats(Result):
    """Statistics of W' where nothing was learned; each field is the null of the one of its name beside it."""

    operator: NullOperator
    density: NullDensity
    coupling: Coupling = Field(description="coupling of tokens where nothing was learned, by C_ij = |B_ij|_F")
    coupling_weighted: Coupling = Field(description="coupling of tokens where nothing was learned, by |B_ij x_j|")


class Nulls(WithReasons):
    """Two values to compare each statistic of W' with; a statistic that equals both says nothing of training."""

    uniform: NullStats | None = Field(
        description="null of uniform attention: the model's weights, scales and gates, H uniform over the positions "
        "that the mask leaves to a row (without a mask, those that some head of the row reaches); closed form"
    )
    reinitialised: Annotated[NullStats | None, Meaning(needs="null")] = Field(
        description="null of the architecture: the model's class built anew from its config (transformers' own "
        "initialisation, fixed seed; one draw, another in every dtype), on as many random tokens; with --null all"
    )


_W_QK = "W_QK = W_Q D_i D_j^T W_K^T, D the map of positions and held norms behind the layers"
_FORM = "Eq. 35"
_RANK = Meaning("dimensions, 1 to the head's width", "exact", formula="|W_QK|_F^2 / sigma_1(W_QK)^2", source=_FORM)
_SYMMETRIC = Meaning("share, 0 to 1", "exact", formula="|(W_QK + W_QK^T) / 2|_F / |W_QK|_F", source=_FORM)
_SYMMETRIC_MEANS = (
    "norm of the symmetric part of W_QK over that of W_QK: 1 of a symmetric one, as x_i.x_j is; 0.71 of a matrix "
    "without any symmetry, drawn at random; 0 of an antisymmetric one"
)
_R2 = "squared correlation, over the attended pairs, of a head's scores before softcap and mask with"


def _r2(of: str) -> Meaning:
    return Meaning(
        "share, 0 to 1", "exact", how="over this prompt's pairs", formula=f"R^2 of s_ij on {of}", source=_FORM
    )


_PLAIN, _CENTRED, _BILINEAR = _r2("x_i.x_j"), _r2("(x_i - mean).(x_j - mean)"), _r2("x_i W_QK x_j")


class HeadRouting(WithReasons):
    """The scores of one head: W_QK at distance 0, and the shares that explain the scores."""

    index: int = Field(description="number of the head, from 0")
    singular_values: Annotated[list[Finite], Meaning("norm of W_QK", "exact", formula=_W_QK, source=_FORM)] = Field(
        description="leading eight singular values of a head's W_QK at distance 0, from its thin factors, in float64"
    )
    frobenius_norm: Annotated[Finite, Meaning("norm of W_QK", "exact", formula="|W_QK|_F", source=_FORM)] = Field(
        description="Frobenius norm of a head's W_QK at distance 0, without the factor by which attention scales the "
        "scores; where the model's code scales the queries instead, as that of OPT, with it"
    )
    spectral_norm: Annotated[Finite, Meaning("norm of W_QK", "exact", formula="sigma_1(W_QK)", source=_FORM)] = Field(
        description="largest singular value of a head's W_QK at distance 0"
    )
    stable_rank: Annotated[Finite | None, _RANK] = Field(description="stable rank of a head's W_QK at distance 0")
    symmetric_share: Annotated[Finite | None, _SYMMETRIC] = Field(description=_SYMMETRIC_MEANS)
    r2_plain: Annotated[Finite | None, _PLAIN] = Field(description=f"{_R2} x_i.x_j, x what the layer reads")
    r2_centred: Annotated[Finite | None, _CENTRED] = Field(
        description=f"{_R2} the covariance of tokens, x_i.x_j of x less its mean over tokens"
    )
    r2_bilinear: Annotated[Finite | None, _BILINEAR] = Field(
        description=f"{_R2} x_i W_QK x_j; 1 where neither positions nor biases nor norms of queries enter"
    )


class RoutingAtDistance(WithReasons):
    """W_QK between a token and the one `distance` tokens in front of it, means over heads."""

    distance: Annotated[int, Meaning("tokens", "given", over_prompts="same")] = Field(
        description="distance i - j of the tokens, i and 0, between which W_QK is taken"
    )
    stable_rank: Annotated[Finite | None, _RANK] = Field(description="mean stable rank of heads' W_QK at `distance`")
    symmetric_share: Annotated[Finite | None, _SYMMETRIC] = Field(
        description=f"mean over heads, at `distance`, of the {_SYMMETRIC_MEANS}"
    )


class Routing(WithReasons):
    """Origin of the attention matrices H of one block: scores of queries and keys, and their form W_QK."""

    rebuilt_error: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "measured",
            formula="|softmax(scale q_i.k_j + mask) - H|_F / |H|_F",
            source=_FORM,
            over_prompts="largest",
            better="lower",
        ),
    ] = Field(description="relative error of H rebuilt from the model's own queries, keys, mask, softcap and sinks")
    stable_rank: Annotated[Finite | None, _RANK] = Field(description="mean stable rank of heads' W_QK at distance 0")
    symmetric_share: Annotated[Finite | None, _SYMMETRIC] = Field(
        description=f"mean over heads, at distance 0, of the {_SYMMETRIC_MEANS}"
    )
    r2_plain: Annotated[Finite | None, _PLAIN] = Field(description=f"mean over heads of the {_R2} x_i.x_j")
    r2_centred: Annotated[Finite | None, _CENTRED] = Field(
        description=f"mean over heads of the {_R2} the covariance of tokens"
    )
    r2_bilinear: Annotated[Finite | None, _BILINEAR] = Field(description=f"mean over heads of the {_R2} x_i W_QK x_j")
    heads: Annotated[list[HeadRouting] | None, Meaning(source=_FORM)] = Field(description="scores and W_QK by head")
    distances: Annotated[list[RoutingAtDistance] | None, Meaning(source=_FORM)] = Field(
        description="W_QK at distances 0, 1, 2, 4, ... of the prompt's tokens; at 0 alone where positions do not enter"
    )


class CrossStats(WithReasons):
    """Statistics of W'_c that do not depend on the scale of the weights."""

    effective_heads: Annotated[Finite | None, _HEADS] = Field(
        description="number of Kronecker products that W'_c acts like, from 1 to heads: exp of the entropy of its "
        "squared Kronecker spectrum; compare its null"
    )
    block_correlation: Annotated[Finite | None, _ALIKE] = Field(
        description="root mean square cosine over all pairs of nonzero blocks of W'_c, each with itself included; "
        "compare its null"
    )
    entropy_bits: Annotated[Finite | None, _BITS] = Field(description=f"entropy of {_BY_NORM}")
    effective_context: Annotated[Finite | None, _CONTEXT] = Field(
        description=f"number of tokens that reach a token in effect: 2^entropy of {_BY_NORM}"
    )
    weighted_entropy_bits: Annotated[Finite | None, _BITS] = Field(description=f"entropy of {_WEIGHTED}")
    weighted_effective_context: Annotated[Finite | None, _CONTEXT] = Field(
        description=f"number of tokens that reach a token in effect: 2^entropy of {_WEIGHTED}"
    )


class CrossOperator(WithReasons):
    """W'_c of one block, N M rows and K width columns, never built; N decoder and K encoder tokens.

    Encoder tokens have no place on the decoder's axis, so W'_c has no diagonal, no distances and no first token. The
    W'_c of a token mixer beside attention reads the mixer's own values: K is N, and width the number of its channels.
    """

    rows: Annotated[Finite, Meaning("entries", "exact", formula="N M")] = Field(description="number of rows of W'_c")
    columns: Annotated[Finite, Meaning("entries", "exact", formula="K width")] = Field(
        description="number of columns of W'_c: K tokens times the width of the encoder's states or the mixer's values"
    )
    frobenius_norm: Annotated[
        Finite | None,
        Meaning(
            "norm of W'_c",
            "exact",
            formula="sqrt(sum_hk K_hk G_hk), K_hk = <H_h S, H_k S>, G_hk = <A_h, A_k>",
            source="W'_c is duat's, after Eq. 10; <H (x) A, K (x) B> = <H, K> <A, B>",
        ),
    ] = Field(description="|W'_c|_F, the root of the sum of the squares of all entries")
    structural_density: Annotated[Finite | None, _FULL] = Field(
        description="share of the entries of W'_c that are not identically zero, by the zeros of the mask, V and O; 1 "
        "where these have none and a token may read every other"
    )
    stats: CrossStats | None = Field(description="statistics of W'_c; null where it has no factors")
    uniform: CrossStats | None = Field(
        description="null of `stats`: the same W'_c with every H uniform over the tokens that it may read, weights, "
        "scales and gates unchanged"
    )
    certificate_error: Annotated[Finite | None, _PROVED_LARGEST] = Field(
        description="largest relative residual of the proof that W'_c e is what cross-attention, or the mixer, adds"
    )
