"""The reports of `duat inspect` and `duat verify`."""

from __future__ import annotations

from typing import Literal

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


class OperatorStats(WithReasons):
    """The frozen attention operator W' of one block, an NM x NM matrix that is never built."""

    rows: Finite = Field(description="N*M, the side of W'")
    dense_bytes: Finite = Field(description="bytes that W' would take as a dense matrix of the run's dtype")
    frobenius_norm: Finite | None = Field(description="exact")
    spectral_norm: Finite | None = Field(description="Lanczos, relative error <= 1e-3; with --spectrum")
    stable_rank: Finite | None = Field(description="(frobenius_norm / spectral_norm)^2; with --spectrum")
    effective_heads: Finite | None = Field(
        description="exp of the entropy of the squared Kronecker spectrum: 1 to heads; compare its nulls; exact"
    )
    block_correlation: Finite | None = Field(
        description="root mean square cosine over all pairs of nonzero blocks B_ij, at most 1 (all alike); near 1 "
        "without any training, because softmax rows are positive: compare its nulls; exact"
    )
    certificate_error: Finite | None = Field(
        description="largest relative residual of the proof that the factors V, O and H are the model's own"
    )


class Density(WithReasons):
    """How full W' is. A causal W' is block triangular: there no entry leads to a token from a later one."""

    structural: Finite | None = Field(
        description="share of entries not identically zero, by the zeros of H, V and O: the union over heads and "
        "channels, block by block; exact"
    )
    numerical: Finite | None = Field(description="share of entries with |w| > threshold * rms(W')")
    numerical_low: Finite | None = Field(description="lower end of the 95 % interval; equal to numerical if exact")
    numerical_high: Finite | None = Field(description="upper end of the 95 % interval; equal to numerical if exact")
    threshold: Finite
    linear_reference: Finite = Field(description="1/N: a linear layer as transformers uses it, I_N (x) W^T")
    linear_reference_paper: Finite = Field(description="1/M: a linear layer in the paper's orientation, W (x) I_M")
    conv1d_reference: Finite = Field(description="a 1-D convolution of width conv_width over N tokens, zero padded")
    conv_width: int


class Coupling(WithReasons):
    """How tokens reach each other through W'; p_ij = C_ij^2 / sum_j C_ij^2."""

    off_diagonal_share: Finite | None = Field(description="1 - sum_i C_ii^2 / sum_ij C_ij^2, 0 to 1")
    entropy_bits: Finite | None = Field(description="mean over rows of the entropy of p_i, bits")
    effective_context: Finite | None = Field(description="mean over rows of 2^entropy, tokens")
    mean_distance: Finite | None = Field(description="mean over rows of sum_j p_ij |i-j|, tokens")
    first_token_share: Finite | None = Field(description="mean of p_i0 over i >= 1, 0 to 1")


class Range(WithReasons):
    """The largest activation of one block, against the dtype in which the checkpoint is stored."""

    largest_activation: Finite | None = Field(
        description="largest absolute value at the output of a norm, of attention, of an FFN unit or of the block, "
        "over tokens and prompts; not of what is inside them, such as attention scores"
    )
    place: Literal["norm", "attention", "ffn", "block"] = Field(description="whose output it is")
    stored_dtype: str | None = Field(description="dtype of most stored bytes; null where that is not known")
    share: Finite | None = Field(
        description="largest_activation / largest number of stored_dtype: above 1 the checkpoint overflows in its own "
        "dtype. Where that is float16 or float8; no activation comes near the largest number of the others"
    )


class NullOperator(WithReasons):
    """`OperatorStats` of a null: what does not depend on how large the weights are."""

    effective_heads: Finite | None = Field(description="exact")
    block_correlation: Finite | None = Field(description="exact")


class NullDensity(WithReasons):
    """`Density` of a null, by the same threshold."""

    structural: Finite | None = Field(description="exact")
    numerical: Finite | None
    numerical_low: Finite | None = Field(description="lower end of the 95 % interval; equal to numerical if exact")
    numerical_high: Finite | None = Field(description="upper end of the 95 % interval; equal to numerical if exact")


class NullStats(Result):
    """What the statistics of W' are where nothing was learned; each field as the one of that name beside it."""

    operator: NullOperator
    density: NullDensity
    coupling: Coupling
    coupling_weighted: Coupling


class Nulls(WithReasons):
    """Two values to compare each statistic of W' with; a statistic that equals both says nothing of training."""

    uniform: NullStats | None = Field(
        description="the same weights and the same scales of every token, H uniform over the positions that some head "
        "of the row reaches; closed form"
    )
    reinitialised: NullStats | None = Field(
        description="the model's class built anew from its config (transformers' own initialisation, fixed seed), on "
        "as many random tokens (the nearest of at most 16 counts); with --null all"
    )


class Part(WithReasons):
    share: Finite | None = Field(description="<part, x> / |x|^2; the three shares of a place sum to 1")
    norm: Finite | None = Field(description="|part| / |x|")


class Parts(Result):
    """One vector split into the paper's three parts, each of everything up to here: all blocks, not this one alone."""

    linear: Part = Field(description="the linear path from x_0, the first block's input")
    static: Part = Field(
        description="all biases, the FFN's output bias among them; carried by T, which the input sets, so it moves "
        "between prompts as well"
    )
    dynamic: Part = Field(
        description="the UAT terms of this block and all before it; at a pre-activation, the part of the bias b'_{j,2} "
        "of Eq. 12/34 that the UAT terms make (its rest, W' b'_{j-1,3} + b, is in `static`)"
    )


class Terms(WithReasons):
    """The paper's sum at one block: shares of its output, of all terms up to here, and the block's own term."""

    linear: Part = Field(description="of all up to here: the linear path from x_0, the first block's input")
    static: Part = Field(description="of all up to here: the biases, carried by T, which the input sets")
    dynamic: Part = Field(description="of all up to here: the UAT terms of this block and all before it")
    own: Part = Field(
        description="this block's own UAT term U_j f_j in its output: a part of `dynamic`, the FFN's output bias not "
        "among it"
    )
    pre_activation: Parts | None = Field(description="the three parts at the FFN's first linear layer")


class Spread(Result):
    """One value over the prompts."""

    low: Finite
    mean: Finite
    high: Finite
    standard_deviation: Finite


class PromptBlock(Result):
    """One block under one prompt."""

    prompt: int
    operator: OperatorStats
    density: Density
    coupling: Coupling
    coupling_weighted: Coupling
    null: Nulls
    terms: Terms
    certificate_error: Finite


class Block(Result):
    """One block, means over the prompts."""

    index: int
    name: str = Field(description="the block's module name")
    operator: OperatorStats
    density: Density
    coupling: Coupling = Field(description="by |B_ij|_F")
    coupling_weighted: Coupling = Field(description="by |B_ij x_j|")
    null: Nulls = Field(description="the same statistics where nothing was learned")
    terms: Terms
    certificate_error: Finite = Field(description="largest over prompts of |x_i - rebuilt| / |x_i|")
    range: Range
    spreads: dict[str, Spread] | None = Field(
        default=None, description="with --per-prompt: 'group.field' to its spread over the prompts"
    )
    prompts: list[PromptBlock] | None = Field(default=None, description="with --per-prompt")


class UatTerm(Result):
    """One term of the UAT sum at the last block's output, means over the prompts."""

    name: str = Field(description="'x_0', 'bias', or the block whose FFN makes the term")
    kind: Literal["linear", "static", "dynamic"]
    block: int | None
    share: Finite
    norm: Finite


class Summary(WithReasons):
    linear_share: Finite | None = Field(description="of all up to the last block's output, mean over prompts")
    static_share: Finite | None = Field(description="of all up to the last block's output")
    dynamic_share: Finite | None = Field(description="of all up to the last block's output")
    effective_context: Finite | None = Field(description="mean over blocks, tokens")
    structural_density: Finite | None = Field(description="mean over blocks")
    notable: list[str] = Field(description="at most three sentences that the numbers support")


class InspectReport(Result):
    """`duat inspect`."""

    schema_version: Literal["2"] = "2"
    command: Literal["inspect"] = "inspect"
    duat_version: str
    environment: Environment
    model: ModelFacts
    prompts: list[PromptFacts]
    certificate: Certificate
    blocks: list[Block]
    terms: list[UatTerm] | None = Field(default=None, description="with --terms")
    summary: Summary
    skipped: list[Skipped]
    warnings: list[str]
    run: Run


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
