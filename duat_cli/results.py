"""The report: every number duat prints, its name in the JSON, its meaning and its unit.

Formatters read these models and nothing else. An undefined value is null, and the reason stands in the
`reasons` of the nearest object, keyed by the field's name; NaN and Infinity are refused on construction.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = "1"

Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(allow_inf_nan=False, ge=0.0, le=1.0)]


class Result(BaseModel):
    """Base of every result: immutable, strict about names, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WithReasons(Result):
    reasons: dict[str, str] = Field(
        default_factory=dict, description="for every field that is null: why it has no value"
    )


class Environment(Result):
    """What the numbers were computed with."""

    python: str
    torch: str
    transformers: str
    platform: str
    device: str
    dtype: str = Field(description="dtype of weights and arithmetic, e.g. float32")
    attention: str = Field(description="attention arithmetic; always the model's own eager formula")
    batch_size: int = Field(description="prompts per forward pass; always 1, so that padding cannot move a number")


class ModelFacts(Result):
    name: str
    revision: str | None = Field(description="commit of a hub checkpoint; null for a local folder")
    model_type: str
    architecture: str = Field(description="the class that was loaded")
    parameters: int
    blocks: int
    hidden_size: int
    heads: int
    kv_heads: int
    fingerprint: str = Field(
        description="content hash of names, shapes, dtypes and bytes of the loaded weights; not cryptographic"
    )


class PromptFacts(Result):
    sha256: str = Field(description="of the prompt's UTF-8 text")
    tokens: int


class Certificate(Result):
    """How far the DUAT form is from the model's own output."""

    relative_error: Finite = Field(description="largest over blocks and prompts of |x - rebuilt| / |x|")
    tolerance: Finite
    exact: bool = Field(description="relative_error <= tolerance")
    capture: Literal["attention interface", "softmax interception"]


class OperatorStats(WithReasons):
    """The frozen attention operator W' of one block, an NM x NM matrix that is never built."""

    rows: Finite = Field(description="N*M, the side of W'")
    dense_bytes: Finite = Field(description="bytes that W' would take as a dense matrix of the run's dtype")
    frobenius_norm: Finite | None = Field(description="exact")
    spectral_norm: Finite | None = Field(description="Lanczos, relative error <= 1e-3; with --spectrum")
    stable_rank: Finite | None = Field(description="(frobenius_norm / spectral_norm)^2; with --spectrum")
    effective_heads: Finite | None = Field(
        description="exp of the entropy of the squared Kronecker spectrum: 1 to heads; exact"
    )
    block_correlation: Finite | None = Field(
        description="root mean square cosine over all pairs of nonzero blocks B_ij: 1/sqrt(heads) to 1; exact"
    )
    certificate_error: Finite | None = Field(
        description="largest relative residual of the proof that the factors V, O and H are the model's own"
    )


class Density(WithReasons):
    """How full W' is."""

    structural: Finite | None = Field(description="share of entries not identically zero; exact")
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


class Part(WithReasons):
    share: Finite | None = Field(description="<part, x> / |x|^2; the three shares of a place sum to 1")
    norm: Finite | None = Field(description="|part| / |x|")


class Parts(Result):
    """One vector split into the paper's three parts."""

    linear: Part = Field(description="the linear path from x_0, the first block's input")
    static: Part = Field(description="all biases, the FFN's output bias among them")
    dynamic: Part = Field(description="the UAT terms; at a pre-activation, the dynamic bias b'_{j,2} of Eq. 12/34")


class Terms(WithReasons):
    """The paper's sum at one block."""

    linear: Part
    static: Part
    dynamic: Part
    pre_activation: Parts | None = Field(description="the same three at the FFN's first linear layer")


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
    terms: Terms
    certificate_error: Finite = Field(description="largest over prompts of |x_i - rebuilt| / |x_i|")
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
    linear_share: Finite | None = Field(description="of the last block's output, mean over prompts")
    static_share: Finite | None
    dynamic_share: Finite | None
    effective_context: Finite | None = Field(description="mean over blocks, tokens")
    structural_density: Finite | None = Field(description="mean over blocks")
    notable: list[str] = Field(description="at most three sentences that the numbers support")


class Skipped(Result):
    what: str
    why: str


class Run(Result):
    """What differs between two runs of the same input."""

    started: str = Field(description="UTC, ISO 8601")
    seconds: Finite
    peak_memory_bytes: int | None


class InspectReport(Result):
    """`duat inspect`."""

    schema_version: Literal["1"] = "1"
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

    schema_version: Literal["1"] = "1"
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


class SupportEntry(Result):
    """How far duat understands one model."""

    model_type: str
    status: Literal["exact", "partly", "refused"]
    path: Literal["attention interface", "softmax interception"] | None
    parts: list[str] = Field(description="for 'partly': what is not covered")
    reason: str | None
    relative_error: Finite | None


class SupportReport(Result):
    """`duat support`."""

    schema_version: Literal["1"] = "1"
    command: Literal["support"] = "support"
    duat_version: str
    transformers: str
    entries: list[SupportEntry]
    run: Run


class MatrixForm(WithReasons):
    """One of the paper's explicit matrices for one block and one prompt."""

    name: str
    formula: str = Field(description="(x) is the Kronecker product, vec is row-major")
    shape: list[int]
    built: bool = Field(description="written out entry by entry; otherwise only its factors exist")
    density: Share | None = Field(description="share of entries that are not zero; counted where built")
    paper_density: Share | None = Field(description="what the paper states for a matrix of this kind")
    paper_formula: str | None = Field(description="paper_density as a formula")


class MatrixCheck(WithReasons):
    """One step of the paper, both sides computed separately."""

    name: str
    statement: str
    relative_error: Finite | None = Field(description="|left - right| / |right|")
    tolerance: Finite
    holds: bool | None = Field(description="relative_error <= tolerance")


class MatrixReport(Result):
    """`duat matrix`: W' of one block under one prompt, as the paper's explicit matrices (Eq. 5-10)."""

    schema_version: Literal["1"] = "1"
    command: Literal["matrix"] = "matrix"
    duat_version: str
    environment: Environment
    model: ModelFacts
    prompt: PromptFacts
    certificate: Certificate = Field(description="of the blocks up to this one")
    layer: int
    name: str = Field(description="the block's module name")
    tokens: int = Field(description="N")
    hidden_size: int = Field(description="M")
    heads: int
    kv_heads: int
    head_width: int = Field(description="d")
    factors: Literal["read", "probed"] = Field(description="where V and O come from: weights, or unit vectors")
    dense: bool = Field(description="whether the matrices are built")
    matrices: list[MatrixForm]
    corner: list[list[Finite]] = Field(description="top-left entries of W'_HVO, of its block B_00")
    token_texts: list[str] = Field(
        description="the first tokens, control characters escaped; empty where the block's N vectors are not the "
        "prompt's tokens"
    )
    coupling: list[list[Finite]] = Field(description="C_ij = |B_ij|_F between these tokens, from j to i")
    checks: list[MatrixCheck]
    warnings: list[str]
    run: Run
