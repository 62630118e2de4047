"""The report of `duat matrix`."""

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
    Share,
    WithReasons,
)


class MatrixForm(WithReasons):
    """One of the paper's explicit matrices for one block and one prompt."""

    name: str
    formula: str = Field(description="(x) is the Kronecker product, vec is row-major")
    shape: list[int]
    built: bool = Field(description="written out entry by entry; otherwise only its factors exist")
    density: Share | None = Field(description="share of entries that are not zero; counted where built")
    expected_density: Share | None = Field(description="what the form and the mask leave if no weight is zero")
    expected_formula: str | None = Field(description="expected_density as a formula")
    papers: str | None = Field(description="what the papers say of such a matrix: quotation, place, what follows")


class MatrixCheck(WithReasons):
    """One step of the paper, both sides computed separately."""

    name: str
    statement: str
    relative_error: Finite | None = Field(description="|left - right| / |right|")
    tolerance: Finite
    holds: bool | None = Field(description="relative_error <= tolerance")


class MatrixReport(Result):
    """`duat matrix`: W' of one block under one prompt, as the paper's explicit matrices (Eq. 5-10)."""

    schema_version: Literal["2"] = "2"
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
