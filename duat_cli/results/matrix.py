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

    name: str = Field(description="the paper's; here W'_HV x' are the heads, where its Eq. 9 applies transposes")
    formula: str = Field(
        description="(x) is the Kronecker product, vec is row-major; S, V_h and O_h hold what norms do, of which the "
        "paper has none"
    )
    shape: list[int] = Field(description="sides of the matrix")
    built: bool = Field(description="written out entry by entry; otherwise only its factors exist")
    density: Annotated[Share | None, Meaning("share, 0 to 1", "exact", how="counted where the matrix is built")] = (
        Field(description="share of entries that are not zero; counted where built")
    )
    expected_density: Annotated[Share | None, Meaning("share, 0 to 1", "exact", how="if no weight is zero")] = Field(
        description="what the form and the mask leave if no weight is zero"
    )
    expected_formula: str | None = Field(description="expected_density as a formula")
    papers: str | None = Field(description="what the papers say of such a matrix: quotation, place, what follows")


class MatrixCheck(WithReasons):
    """Check of one step of the paper, with both sides computed separately."""

    name: str = Field(description="the step, in a word")
    statement: str = Field(description="what is tested, as a formula")
    relative_error: Annotated[Finite | None, Meaning("relative", "measured", source="Eq. 5-10")] = Field(
        description="|left - right| / |right|"
    )
    tolerance: Annotated[Finite, Meaning("relative", "given")] = Field(
        description="the largest error that passes: where the heads nearly cancel each other, their rounding"
    )
    holds: bool | None = Field(description="relative_error <= tolerance")


class Convolution(Result):
    """A 1-D convolution over the same tokens, to compare what it reads of them with what attention reads."""

    width: int = Field(description="k, tokens; padded with zeros, so that there are N outputs")
    coupling: Annotated[
        list[list[Finite]],
        Meaning("norm", "exact", formula="|K_w|_F, w = j - i + (k-1)/2", source="appendix C, Fig. 5"),
    ] = Field(
        description="C_ij between the first tokens; its weights are drawn, so only where it is zero says anything"
    )
    tokens_read: Annotated[Finite, Meaning("tokens", "exact", source="appendix C, Fig. 5")] = Field(
        description="how many tokens an output token is made of, mean over tokens"
    )
    attention_tokens_read: Annotated[Finite, Meaning("tokens", "exact", source="appendix C, Fig. 4")] = Field(
        description="the same of this block's attention: entries of H that are not zero"
    )


class MatrixReport(ModelReport):
    """`duat matrix`: W' of one block under one prompt, as the paper's explicit matrices (Eq. 5-10)."""

    command: Annotated[Literal["matrix"], COMMAND] = "matrix"
    prompt: PromptFacts
    certificate: Certificate = Field(description="of the blocks up to this one")
    layer: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    tokens: int = Field(description="N")
    hidden_size: int = Field(description="M")
    heads: int = Field(description="number of attention heads")
    kv_heads: int = Field(description="number of key and value heads")
    head_width: int = Field(description="d")
    factors: Literal["read", "probed"] = Field(description="where V and O come from: weights, or unit vectors")
    dense: bool = Field(description="whether the matrices are built")
    matrices: list[MatrixForm]
    corner: Annotated[list[list[Finite]], Meaning("entries of W'", "exact", source="Eq. 10", signed=True)] = Field(
        description="top-left entries of W'_HVO, of its block B_00"
    )
    token_texts: list[str] = Field(
        description="the first tokens, control characters escaped; empty where the block's N vectors are not the "
        "prompt's tokens"
    )
    coupling: Annotated[list[list[Finite]], Meaning("norm", "exact", formula="C_ij = |B_ij|_F", source="Eq. 10")] = (
        Field(description="C_ij = |B_ij|_F between these tokens, from j to i")
    )
    convolution: Convolution
    checks: list[MatrixCheck]
    warnings: Warnings
    run: Run


def _error(formula: str, source: str) -> Meaning:
    return Meaning("relative", "measured", formula=formula, source=source, better="lower")


class NetworkLayer(WithReasons):
    """Check of one layer: the equation of all layers up to it, with sigma live, against the model's own values."""

    layer: int = Field(description="j, from 1 as in the paper: block j - 1")
    name: str = Field(description="the block's module name")
    equation: Literal["21", "23", "33"] = Field(description="which equation of the paper: of 1, 2 or more layers")
    activation: str | None = Field(description="sigma; found by its values")
    gated: bool | None = Field(description="whether sigma takes two pre-activations a neuron: sigma(gate) o up")
    neurons: int | None = Field(description="neurons of one token; of routed experts those of its own experts")
    experts: int | None = Field(description="k, routed experts of one token")
    pre_activation_error: Annotated[Finite | None, _error("|W'_{j,2} x'_0 + b'_{j,2} - a_j| / |a_j|", "Eq. 34")] = (
        Field(description="what sigma reads, against what the model's own layers gave to it")
    )
    unit_error: Annotated[Finite | None, _error("|FFN_j(sigma(a_j)) - its own output| / |the latter|", "Eq. 29")] = (
        Field(description="what the FFN gives, through sigma of this sum, against what the model's own FFN gave")
    )
    output_error: Annotated[Finite, _error("|x_j by the equation - x_j| / |x_j|", "Eq. 21, 23, 33")] = Field(
        description="the layer's output by the equation, against the model's own"
    )


class NetworkReport(ModelReport):
    """`duat matrix --network`: the whole network of one prompt as explicit matrices (appendix B, Fig. 2)."""

    command: Annotated[Literal["matrix --network"], COMMAND] = "matrix --network"
    prompt: PromptFacts
    certificate: Certificate = Field(description="its relative_error is the largest of all errors of this report")
    tokens: int = Field(description="N")
    hidden_size: int = Field(description="M")
    side: int = Field(description="N M: the side of W'_{j,1}; at most 4096")
    layers: list[NetworkLayer]
    whole_error: Annotated[
        Finite,
        _error("|W'_{L,1} x'_0 + b'_{L,3} + sum_j W'_{j,3} sigma(W'_{j,2} x'_0 + b'_{j,2}) - x_L| / |x_L|", "Eq. 33"),
    ] = Field(
        description="Eq. 33 of all layers from the matrices alone, every W'_{j,3} made, against the model's own x_L"
    )
    deviations: list[str] = Field(description="where the model is not what the paper's equations are written for")
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
