"""The reports of `duat matrix` and `duat matrix --network`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
    Certificate,
    Finite,
    ModelReport,
    PromptFacts,
    Result,
    Run,
    Share,
    Skipped,
    Warnings,
    WithReasons,
)
from duat_cli.results.meaning import Meaning


class MatrixForm(WithReasons):
    """One of the paper's explicit matrices for one block and one prompt."""

    name: str = Field(
        description="the paper's name of the matrix; W'_HV x' are the heads here, where the paper's Eq. 9 applies "
        "transposes"
    )
    formula: str = Field(
        description="formula of the matrix: (x) is the Kronecker product, vec is row-major; S, V_h and O_h hold what "
        "norms do, of which the paper has none"
    )
    shape: list[int] = Field(description="number of rows and of columns of the matrix; of the vector x' its length")
    built: bool = Field(
        description="whether the matrix is written out entry by entry; otherwise only its factors exist"
    )
    density: Annotated[Share | None, Meaning("share, 0 to 1", "exact", how="counted where the matrix is built")] = (
        Field(description="share of the entries of the matrix that are not zero; counted where it is built")
    )
    expected_density: Annotated[Share | None, Meaning("share, 0 to 1", "exact", how="if no weight is zero")] = Field(
        description="share of the entries of the matrix that its form and the mask leave nonzero if no weight is zero"
    )
    expected_formula: str | None = Field(description="formula of `expected_density`")
    papers: str | None = Field(description="what the papers say of such a matrix: quotation, place, what follows")


class MatrixCheck(WithReasons):
    """Check of one step of the paper, with both sides computed separately."""

    name: str = Field(description="the step of the paper that is checked, in a word")
    statement: str = Field(description="what the check of one step of the paper tests, as a formula")
    relative_error: Annotated[Finite | None, Meaning("relative", "measured", source="Eq. 5-10")] = Field(
        description="relative difference of the two sides of a checked statement, |left - right| / |right|"
    )
    tolerance: Annotated[Finite, Meaning("relative", "given")] = Field(
        description="largest `relative_error` with which the checked statement holds: that of the dtype or, where the "
        "heads nearly cancel each other, their rounding"
    )
    holds: bool | None = Field(
        description="whether the checked statement holds: `relative_error` is at most `tolerance`"
    )


class Convolution(Result):
    """A 1-D convolution over the same tokens, to compare what it reads of them with what attention reads."""

    width: int = Field(
        description="width k of the convolution in tokens; padded with zeros, so that there are N outputs"
    )
    coupling: Annotated[
        list[list[Finite]],
        Meaning("norm", "exact", formula="|K_w|_F, w = j - i + (k-1)/2", source="appendix C, Fig. 5"),
    ] = Field(
        description="coupling C_ij of the first tokens through the convolution, whose weights are drawn, so that only "
        "where it is zero says anything"
    )
    tokens_read: Annotated[Finite, Meaning("tokens", "exact", source="appendix C, Fig. 5")] = Field(
        description="number of tokens that an output token of the convolution is made of, mean over tokens"
    )
    attention_tokens_read: Annotated[Finite, Meaning("tokens", "exact", source="appendix C, Fig. 4")] = Field(
        description="number of tokens that an output token of the block's attention is made of, by entries of H that "
        "are not zero in some head, mean over tokens"
    )


class MatrixReport(ModelReport):
    """`duat matrix`: W' of one block under one prompt, as the paper's explicit matrices (Eq. 5-10)."""

    command: Annotated[Literal["matrix"], COMMAND] = "matrix"
    prompt: PromptFacts
    certificate: Certificate = Field(description="certificate of the blocks up to the one whose W' is reported")
    layer: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    tokens: int = Field(description="number N of tokens, or other vectors, in the residual stream")
    hidden_size: int = Field(description="hidden size M: width of the residual stream")
    heads: int = Field(
        description="number of attention heads; where a gate inside attention scales channels, every channel is one"
    )
    kv_heads: int = Field(description="number of key and value heads")
    head_width: int = Field(description="width d of the values of one head")
    factors: Literal["read", "probed"] = Field(
        description="how the factors V and O of W' were found: read from weights, or probed with unit vectors"
    )
    dense: bool = Field(
        description="whether the matrices of attention are built entry by entry; not if their longest side is over 4096"
    )
    matrices: list[MatrixForm]
    corner: Annotated[list[list[Finite]], Meaning("entries of W'", "exact", source="Eq. 10", signed=True)] = Field(
        description="top-left entries of W'_HVO, in its block B_00"
    )
    token_texts: list[str] = Field(
        description="texts of the first tokens, control characters escaped; empty where the block's N vectors are not "
        "the prompt's tokens"
    )
    coupling: Annotated[list[list[Finite]], Meaning("norm", "exact", formula="C_ij = |B_ij|_F", source="Eq. 10")] = (
        Field(
            description="coupling C_ij = |B_ij|_F of the block's first tokens, from token j to token i, a row a token i"
        )
    )
    convolution: Convolution
    checks: list[MatrixCheck]
    warnings: Warnings
    run: Run


def _error(formula: str, source: str) -> Meaning:
    return Meaning("relative", "measured", formula=formula, source=source, better="lower")


def _by_token(formula: str, source: str) -> Meaning:
    """Of an error over all tokens, with this formula, or of the worst token."""
    return _error(f"the larger of {formula} and the largest over tokens, relative to that token's terms", source)


class NetworkLayer(WithReasons):
    """Check of one layer: the equation of all layers up to it, with sigma live, against the model's own values."""

    layer: int = Field(description="number j of a layer, from 1 as in the paper: block j - 1")
    name: str = Field(description="the block's module name")
    equation: Literal["21", "23", "33"] = Field(
        description="equation of the paper that gives the layer's output: 21 for the first layer, 23 for the second, "
        "33 for later ones"
    )
    activation: str | None = Field(description="activation function sigma of the layer's FFN, found by its values")
    gated: bool | None = Field(
        description="whether sigma of the layer's FFN takes two pre-activations a neuron: sigma(gate) o up"
    )
    neurons: int | None = Field(
        description="number of FFN neurons of one token; of routed experts those of its own experts"
    )
    experts: int | None = Field(description="number k of routed experts of one token; null where the FFN has none")
    pre_activation_error: Annotated[Finite | None, _by_token("|W'_{j,2} x'_0 + b'_{j,2} - a_j| / |a_j|", "Eq. 34")] = (
        Field(
            description="relative error of what sigma reads by the equation against the model's own values, of all "
            "tokens together or of the worst token"
        )
    )
    unit_error: Annotated[Finite | None, _error("|FFN_j(sigma(a_j)) - its own output| / |the latter|", "Eq. 29")] = (
        Field(
            description="relative error of what the FFN gives, through sigma of what it reads by the equation, against "
            "what the model's own FFN gave"
        )
    )
    output_error: Annotated[Finite, _by_token("|x_j by the equation - x_j| / |x_j|", "Eq. 21, 23, 33")] = Field(
        description="relative error of the layer's output by the equation, against the model's own, of all tokens "
        "together or of the worst token"
    )


class NetworkReport(ModelReport):
    """`duat matrix --network`: the whole network of one prompt as explicit matrices (appendix B, Fig. 2)."""

    command: Annotated[Literal["matrix --network"], COMMAND] = "matrix --network"
    prompt: PromptFacts
    certificate: Certificate = Field(
        description="certificate whose `relative_error` is the largest of all errors of this report"
    )
    tokens: int = Field(description="number N of tokens, or other vectors, in the residual stream")
    hidden_size: int = Field(description="hidden size M: width of the residual stream")
    side: int = Field(description="side N M of the square matrices W'_{j,1}; at most 4096")
    layers: list[NetworkLayer]
    whole_error: Annotated[
        Finite,
        _by_token(
            "|W'_{L,1} x'_0 + b'_{L,3} + sum_j W'_{j,3} sigma(W'_{j,2} x'_0 + b'_{j,2}) - x_L| / |x_L|", "Eq. 33"
        ),
    ] = Field(
        description="relative error of Eq. 33 of all layers from the matrices alone, every W'_{j,3} made, against the "
        "model's own output x_L, of all tokens together or of the worst token"
    )
    deviations: list[str] = Field(description="where the model is not what the paper's equations are written for")
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
