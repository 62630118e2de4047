"""The reports of `duat inspect` and `duat verify`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    Certificate,
    Environment,
    Finite,
    ModelFacts,
    PromptFacts,
    Result,
    Run,
    Skipped,
    WithReasons,
)
from duat_cli.results.meaning import Meaning

_METRICS = Meaning(drift="group")
_MACHINE = Meaning(checked=False)
_ERROR = Meaning("relative", "measured", over_prompts="largest", better="lower")
_SHARE = Meaning("share", "exact", signed=True, drift="number")  # of a sum of vectors


class OperatorStats(WithReasons):
    """The frozen attention operator W' of one block, an NM x NM matrix that is never built."""

    rows: Annotated[Finite, Meaning("entries", "exact")] = Field(description="N*M, the side of W'")
    dense_bytes: Annotated[Finite, Meaning("bytes", "exact")] = Field(
        description="bytes that W' would take as a dense matrix of the run's dtype"
    )
    frobenius_norm: Annotated[Finite | None, Meaning("norm of W'", "exact", drift="norm")] = Field(
        description="|W'|_F, the root of the sum of the squares of all entries"
    )
    spectral_norm: Annotated[Finite | None, Meaning("norm of W'", "estimate", needs="spectrum", drift="norm")] = Field(
        description="largest singular value of W', by Lanczos: relative error <= 1e-3; with --spectrum"
    )
    stable_rank: Annotated[Finite | None, Meaning("dimensions", "estimate", needs="spectrum", drift="number")] = Field(
        description="(frobenius_norm / spectral_norm)^2; with --spectrum"
    )
    effective_heads: Annotated[Finite | None, Meaning("heads", "exact", drift="number")] = Field(
        description="exp of the entropy of the squared Kronecker spectrum: 1 to heads; compare its nulls"
    )
    block_correlation: Annotated[Finite | None, Meaning("cosine", "exact", drift="number")] = Field(
        description="root mean square cosine over all pairs of nonzero blocks B_ij, at most 1 (all alike); near 1 "
        "without any training, because softmax rows are positive: compare its nulls"
    )
    certificate_error: Annotated[Finite | None, _ERROR] = Field(
        description="largest relative residual of the proof that the factors V, O and H are the model's own"
    )


class Density(WithReasons):
    """How full W' is. A causal W' is block triangular: there no entry leads to a token from a later one."""

    structural: Annotated[Finite | None, Meaning("share", "exact", drift="number")] = Field(
        description="share of entries not identically zero, by the zeros of H, V and O: the union over heads and "
        "channels, block by block"
    )
    numerical: Annotated[Finite | None, Meaning("share", "estimate", drift="number")] = Field(
        description="share of entries with |w| > threshold * rms(W')"
    )
    numerical_low: Annotated[Finite | None, Meaning("share", "estimate")] = Field(
        description="lower end of the 95 % interval; equal to numerical if exact"
    )
    numerical_high: Annotated[Finite | None, Meaning("share", "estimate")] = Field(
        description="upper end of the 95 % interval; equal to numerical if exact"
    )
    threshold: Annotated[Finite, Meaning("rms of W'", "given", over_prompts="same")] = Field(
        description="with --threshold: what an entry must exceed to count in `numerical`"
    )
    linear_reference: Annotated[Finite, Meaning("share", "exact")] = Field(
        description="1/N: a linear layer as transformers uses it, I_N (x) W^T"
    )
    linear_reference_paper: Annotated[Finite, Meaning("share", "exact")] = Field(
        description="1/M: a linear layer in the paper's orientation, W (x) I_M"
    )
    conv1d_reference: Annotated[Finite, Meaning("share", "exact")] = Field(
        description="a 1-D convolution of width conv_width over N tokens, zero padded"
    )
    conv_width: Annotated[int, Meaning("tokens", "given", over_prompts="same")]


class Coupling(WithReasons):
    """How tokens reach each other through W'; p_ij = C_ij^2 / sum_j C_ij^2."""

    off_diagonal_share: Annotated[Finite | None, Meaning("share", "exact", drift="number")] = Field(
        description="1 - sum_i C_ii^2 / sum_ij C_ij^2, 0 to 1"
    )
    entropy_bits: Annotated[Finite | None, Meaning("bits", "exact", drift="number")] = Field(
        description="mean over rows of the entropy of p_i, bits"
    )
    effective_context: Annotated[Finite | None, Meaning("tokens", "exact", drift="number")] = Field(
        description="mean over rows of 2^entropy, tokens"
    )
    mean_distance: Annotated[Finite | None, Meaning("tokens", "exact", drift="number")] = Field(
        description="mean over rows of sum_j p_ij |i-j|, tokens"
    )
    distance_deviation: Annotated[Finite | None, Meaning("tokens", "exact")] = Field(
        description="standard deviation over rows of sum_j p_ij |i-j|, tokens: 0 where every row reads equally far "
        "away, sqrt((N^2-1)/12) where all read the first token; compare its nulls"
    )
    first_token_share: Annotated[Finite | None, Meaning("share", "exact", drift="number")] = Field(
        description="mean of p_i0 over i >= 1, 0 to 1"
    )


class Range(WithReasons):
    """The largest activation of one block, against the dtype in which the checkpoint is stored."""

    largest_activation: Annotated[Finite | None, Meaning("activation", "measured")] = Field(
        description="largest absolute value at the output of a norm, of attention, of an FFN unit or of the block, "
        "over tokens and prompts; not of what is inside them, such as attention scores"
    )
    place: Literal["norm", "attention", "ffn", "block"] = Field(description="whose output it is")
    stored_dtype: str | None = Field(description="dtype of most stored bytes; null where that is not known")
    share: Annotated[Finite | None, Meaning("relative", "measured")] = Field(
        description="largest_activation / largest number of stored_dtype: above 1 the checkpoint overflows in its own "
        "dtype. Where that is float16 or float8; no activation comes near the largest number of the others"
    )


class NullOperator(WithReasons):
    """`OperatorStats` of a null: what does not depend on how large the weights are."""

    effective_heads: Annotated[Finite | None, Meaning("heads", "exact")]
    block_correlation: Annotated[Finite | None, Meaning("cosine", "exact")]


class NullDensity(WithReasons):
    """`Density` of a null, by the same threshold."""

    structural: Annotated[Finite | None, Meaning("share", "exact")]
    numerical: Annotated[Finite | None, Meaning("share", "estimate")]
    numerical_low: Annotated[Finite | None, Meaning("share", "estimate")] = Field(
        description="lower end of the 95 % interval; equal to numerical if exact"
    )
    numerical_high: Annotated[Finite | None, Meaning("share", "estimate")] = Field(
        description="upper end of the 95 % interval; equal to numerical if exact"
    )


class NullStats(Result):
    """What the statistics of W' are where nothing was learned; each field as the one of that name beside it."""

    operator: NullOperator
    density: NullDensity
    coupling: Coupling
    coupling_weighted: Coupling


class Nulls(WithReasons):
    """Two values to compare each statistic of W' with; a statistic that equals both says nothing of training."""

    uniform: NullStats | None = Field(
        description="the same weights and the same scales of every token, H uniform over the positions that the mask "
        "leaves to a row (without a mask, those that some head of the row reaches); closed form"
    )
    reinitialised: Annotated[NullStats | None, Meaning(needs="null")] = Field(
        description="the model's class built anew from its config (transformers' own initialisation, fixed seed), on "
        "as many random tokens; with --null all"
    )


class Part(WithReasons):
    share: Annotated[Finite | None, _SHARE] = Field(
        description="<part, x> / |x|^2; the three shares of a place sum to 1"
    )
    norm: Annotated[Finite | None, Meaning("relative", "exact", drift="number")] = Field(description="|part| / |x|")


class Parts(Result):
    """One vector split into the paper's three parts, each of everything up to here: all blocks, not this one alone."""

    linear: Annotated[Part, _METRICS] = Field(description="the linear path from x_0, the first block's input")
    static: Annotated[Part, _METRICS] = Field(
        description="all biases, the FFN's output bias among them; carried by T, which the input sets, so it moves "
        "between prompts as well"
    )
    dynamic: Annotated[Part, _METRICS] = Field(
        description="the UAT terms of this block and all before it; at a pre-activation, the part of the bias b'_{j,2} "
        "of Eq. 12/34 that the UAT terms make (its rest, W' b'_{j-1,3} + b, is in `static`)"
    )


class Terms(WithReasons):
    """The paper's sum at one block: shares of its output, of all terms up to here, and the block's own term."""

    linear: Annotated[Part, _METRICS] = Field(
        description="of all up to here: the linear path from x_0, the first block's input"
    )
    static: Annotated[Part, _METRICS] = Field(
        description="of all up to here: the biases, carried by T, which the input sets"
    )
    dynamic: Annotated[Part, _METRICS] = Field(
        description="of all up to here: the UAT terms of this block and all before it"
    )
    own: Part = Field(
        description="this block's own UAT term U_j f_j in its output: a part of `dynamic`, the FFN's output bias not "
        "among it"
    )
    pre_activation: Annotated[Parts | None, _METRICS] = Field(
        description="the three parts at the FFN's first linear layer"
    )


class Spread(Result):
    """One value over the prompts, in its own unit."""

    low: Annotated[Finite, Meaning("the field's", signed=True)]
    mean: Annotated[Finite, Meaning("the field's", signed=True)]
    high: Annotated[Finite, Meaning("the field's", signed=True)]
    standard_deviation: Annotated[Finite, Meaning("the field's")]


class PromptBlock(Result):
    """One block under one prompt."""

    prompt: int
    operator: OperatorStats
    density: Density
    coupling: Coupling
    coupling_weighted: Coupling
    null: Annotated[Nulls, Meaning(by_name=True)]
    terms: Terms
    certificate_error: Annotated[Finite, _ERROR]


class Block(Result):
    """One block, means over the prompts."""

    index: int
    name: str = Field(description="the block's module name")
    operator: Annotated[OperatorStats, _METRICS]
    density: Annotated[Density, _METRICS]
    coupling: Annotated[Coupling, _METRICS] = Field(description="by |B_ij|_F")
    coupling_weighted: Annotated[Coupling, _METRICS] = Field(description="by |B_ij x_j|")
    null: Annotated[Nulls, Meaning(by_name=True)] = Field(description="the same statistics where nothing was learned")
    terms: Annotated[Terms, _METRICS]
    certificate_error: Annotated[Finite, _ERROR] = Field(description="largest over prompts of |x_i - rebuilt| / |x_i|")
    range: Range
    spreads: Annotated[dict[str, Spread] | None, Meaning(needs="per_prompt", keyed_by=PromptBlock)] = Field(
        default=None, description="with --per-prompt: 'group.field' to its spread over the prompts"
    )
    prompts: Annotated[list[PromptBlock] | None, Meaning(needs="per_prompt")] = Field(
        default=None, description="with --per-prompt"
    )


class UatTerm(Result):
    """One term of the UAT sum at the last block's output, means over the prompts."""

    name: str = Field(description="'x_0', 'bias', or the block whose FFN makes the term")
    kind: Literal["linear", "static", "dynamic"]
    block: int | None
    share: Annotated[Finite, Meaning("share", "exact", signed=True)] = Field(
        description="<term, x> / |x|^2; all shares sum to 1"
    )
    norm: Annotated[Finite, Meaning("relative", "exact")] = Field(description="|term| / |x|")


class Summary(WithReasons):
    linear_share: Annotated[Finite | None, _SHARE] = Field(
        description="of all up to the last block's output, mean over prompts"
    )
    static_share: Annotated[Finite | None, _SHARE] = Field(description="of all up to the last block's output")
    dynamic_share: Annotated[Finite | None, _SHARE] = Field(description="of all up to the last block's output")
    effective_context: Annotated[Finite | None, Meaning("tokens", "exact", drift="number")] = Field(
        description="mean over blocks, tokens"
    )
    structural_density: Annotated[Finite | None, Meaning("share", "exact", drift="number")] = Field(
        description="mean over blocks"
    )
    notable: list[str] = Field(description="at most three sentences that the numbers support")


class InspectReport(Result):
    """`duat inspect`."""

    schema_version: Literal["2"] = "2"
    command: Literal["inspect"] = "inspect"
    duat_version: str
    environment: Annotated[Environment, _MACHINE]
    model: ModelFacts
    prompts: list[PromptFacts]
    certificate: Certificate
    blocks: Annotated[list[Block], _METRICS]
    terms: Annotated[list[UatTerm] | None, Meaning(needs="terms")] = Field(default=None, description="with --terms")
    summary: Annotated[Summary, _METRICS]
    skipped: list[Skipped]
    warnings: list[str]
    run: Annotated[Run, _MACHINE]


class BlockCertificate(Result):
    index: int
    name: str
    certificate_error: Finite
    operator_error: Finite | None = Field(description="of the factors of W'; null where they are not Kronecker")
    operator_reason: str | None = Field(description="why operator_error is null")


class VerifyReport(Result):
    """`duat verify`: the certificate alone."""

    schema_version: Literal["2"] = "2"
    command: Literal["verify"] = "verify"
    duat_version: str
    environment: Environment
    model: ModelFacts
    prompts: list[PromptFacts]
    certificate: Certificate
    blocks: list[BlockCertificate]
    skipped: list[Skipped]
    warnings: list[str]
    run: Run
