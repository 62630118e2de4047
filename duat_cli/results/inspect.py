"""The reports of `duat inspect` and `duat verify`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
    REBUILT,
    Certificate,
    Environment,
    Finite,
    ModelReport,
    PromptFacts,
    Report,
    Result,
    Run,
    Skipped,
    Warnings,
    WithReasons,
)
from duat_cli.results.heads import Heads
from duat_cli.results.meaning import Meaning
from duat_cli.results.operator import PROVED, Coupling, CrossOperator, Density, Nulls, OperatorStats, Routing
from duat_cli.results.prompts import AS_SET, WHICH, PromptSetFacts
from duat_cli.results.terms import Terms, UatTerm

_COUPLING = Meaning(drift="group", rule="drift.coupling")
_BY_NORM = Field(description="coupling of a block's tokens through W', by the norms C_ij = |B_ij|_F")
_BY_EFFECT = Field(description="coupling of a block's tokens through W', by |B_ij x_j|, what token j adds to token i")
_MACHINE = Meaning(checked=False)
_TOTAL = Meaning("share", "exact", source="Eq. 11, 33", signed=True, drift="number")
_ENCODER_SHARE = Meaning("share", "exact", source="Eq. 11, 33", signed=True, checked=False)
_Cross = Annotated[
    CrossOperator | None,
    Meaning(by_name=True, checked=False),
    Field(
        description="the second operator W'_c: cross-attention's, in a decoder, or that of a token mixer beside "
        "attention; null in blocks with neither"
    ),
]
_WithRouting = Annotated[
    Routing | None,
    Meaning(needs="routing", by_name=True),
    Field(description="origin of a block's H: scores of queries and keys, and their form W_QK; with --routing"),
]
_WithHeads = Annotated[
    Heads | None,
    Meaning(needs="heads", by_name=True),
    Field(description="statistics of what each attention head of a block reads, by H alone; with --heads"),
]


class Range(WithReasons):
    """The largest activation of one block, against the dtype in which transformers loads the checkpoint."""

    largest_activation: Annotated[
        Finite | None, Meaning("as the activations", "measured", how="over these prompts", formula="max |a|")
    ] = Field(
        description="largest absolute value at the output of a norm, of attention, of an FFN unit or of the block, "
        "over tokens and prompts; not of what is inside them, such as attention scores"
    )
    place: Literal["norm", "attention", "ffn", "block"] = Field(
        description="what `largest_activation` is the output of"
    )
    stored_dtype: str | None = Field(
        description="dtype of most bytes that the checkpoint stores, of quantised weights the one that config.json "
        "states; null where no floating-point tensor is stored"
    )
    dtype: str | None = Field(
        default=None,
        description="dtype in which transformers loads the checkpoint: the one that config.json states for the whole "
        "model, else `stored_dtype`; null in reports of old versions, which compare with `stored_dtype`",
    )
    share: Annotated[
        Finite | None,
        Meaning(
            "times the largest number of the dtype",
            "measured",
            how="over these prompts",
            formula="largest_activation / largest number of `dtype`",
        ),
    ] = Field(
        description="`largest_activation` / largest number of `dtype`: above 1 the checkpoint overflows as loaded by "
        "transformers. Null of dtypes other than float16 and float8, whose largest number no activation comes near"
    )


class Spread(Result):
    """One value over the prompts, in its own unit."""

    low: Annotated[Finite, Meaning("the field's", signed=True)] = Field(
        description="smallest value of a number over the prompts"
    )
    mean: Annotated[Finite, Meaning("the field's", signed=True)] = Field(
        description="mean of a number over the prompts"
    )
    high: Annotated[Finite, Meaning("the field's", signed=True)] = Field(
        description="largest value of a number over the prompts"
    )
    standard_deviation: Annotated[Finite, Meaning("the field's")] = Field(
        description="standard deviation of a number over the prompts"
    )


class PromptBlock(Result):
    """One block under one prompt."""

    prompt: int = Field(description="number of the prompt, from 0")
    operator: OperatorStats
    density: Density
    coupling: Annotated[Coupling, _BY_NORM]
    coupling_weighted: Annotated[Coupling, _BY_EFFECT]
    null: Annotated[Nulls, Meaning(by_name=True)]
    terms: Terms
    cross: _Cross = None
    certificate_error: Annotated[Finite, REBUILT] = Field(
        description="relative error of the block's rebuilt output or FFN inputs against the model's own, of all tokens "
        "together or of the worst token, the largest"
    )
    routing: _WithRouting = None
    heads: _WithHeads = None


class Block(Result):
    """Statistics of one block, means over the prompts."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    operator: Annotated[OperatorStats, Meaning(drift="group", rule="drift.operator")]
    density: Annotated[Density, Meaning(drift="group", rule="drift.density")]
    coupling: Annotated[Coupling, _COUPLING, _BY_NORM]
    coupling_weighted: Annotated[Coupling, _COUPLING, _BY_EFFECT]
    null: Annotated[Nulls, Meaning(by_name=True)] = Field(
        description="statistics of W' where nothing was learned, to compare the block's own with"
    )
    terms: Annotated[Terms, Meaning(drift="group", rule="drift.terms")]
    cross: _Cross = None
    certificate_error: Annotated[Finite, REBUILT] = Field(
        description="largest relative error of the block's rebuilt output and FFN inputs against the model's own, of "
        "all tokens together or of the worst token, over the prompts"
    )
    range: Range
    routing: _WithRouting = None
    heads: _WithHeads = None
    spreads: Annotated[dict[str, Spread] | None, Meaning(needs="per_prompt", keyed_by=PromptBlock)] = Field(
        default=None, description="spread over the prompts of each number, by 'group.field'; with --per-prompt"
    )
    prompts: Annotated[list[PromptBlock] | None, Meaning(needs="per_prompt")] = Field(
        default=None, description="statistics of a block under each prompt; with --per-prompt"
    )


class Summary(WithReasons):
    """The most important numbers, and sentences based on them."""

    linear_share: Annotated[Finite | None, _TOTAL] = Field(
        description="share of the linear path in the output of the report's last block, mean over the prompts"
    )
    static_share: Annotated[Finite | None, _TOTAL] = Field(
        description="share of all biases in the output of the report's last block, mean over the prompts"
    )
    dynamic_share: Annotated[Finite | None, _TOTAL] = Field(
        description="share of all UAT terms in the output of the report's last block, mean over the prompts"
    )
    encoder_share: Annotated[Finite | None, _ENCODER_SHARE] = Field(
        default=None,
        description="share of the encoder's states, or of what the vision part adds between blocks, in the output of "
        "the report's last block, mean over the prompts; null where there is neither",
    )
    effective_context: Annotated[Finite | None, Meaning("tokens", "exact", drift="number")] = Field(
        description="number of tokens that reach a token through W' in effect, mean over the blocks that have a W'"
    )
    structural_density: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", drift="number")] = Field(
        description="share of the entries of W' that are not identically zero, mean over the blocks that have a W'"
    )
    notable: list[str] = Field(description="at most three sentences that the numbers support")


class EndToEndNulls(WithReasons):
    """Nulls of the end-to-end coupling, in which attention has learned nothing."""

    uniform: Coupling | None = Field(
        description="null of the end-to-end coupling with every H uniform over the tokens that its rows may see"
    )
    reinitialised: Annotated[Coupling | None, Meaning(checked=False)] = Field(
        description="null of the end-to-end coupling of the re-initialised architecture; not computed, always null"
    )


class EndToEnd(Result):
    """Coupling of the tokens of x_0 with those of the last block's output, through all blocks and the residual path."""

    coupling: Coupling = Field(
        description="coupling of the tokens of x_0 with those of the last block's output, by c_ij = |(T_L...T_1)(e_j "
        "(x) x_0[j])_i|: along the linear path alone, dynamic parameters frozen; other terms of the sum start in the "
        "blocks and are no part of it"
    )
    null: EndToEndNulls = Field(description="nulls of the end-to-end coupling, in which attention has learned nothing")
    certificate_error: Annotated[
        Finite, replace(REBUILT, formula="|sum_j (T_L...T_1)(e_j (x) x_0[j]) - (T_L...T_1) x_0| / |the latter|")
    ] = Field(description="relative error of the source tokens' parts together against the output's linear part")


class BlockMap(Result):
    """The coupling matrix C of one block under one prompt."""

    index: int = Field(description="number of the block, from 0")
    coupling: Annotated[
        list[list[Finite]],
        Meaning("norm of W'", "exact", how="four digits are kept", formula="C_ij = |B_ij|_F", source="Eq. 10"),
    ] = Field(description="C_ij between tokens: a row for each token i, j from 0, without the zeros at the row's end")


class CouplingMap(Result):
    """Coupling of the first tokens of one prompt with each other through W', block by block."""

    prompt: int = Field(description="number of the prompt, from 0")
    total_tokens: int = Field(description="number of tokens of the mapped prompt, as the blocks read them")
    tokens: list[str] = Field(
        description="texts of the prompt's first tokens, which are mapped, each decoded alone; 'vector 0', ... where "
        "the blocks read other vectors"
    )
    blocks: list[BlockMap] = Field(description="coupling matrices of the blocks whose W' has factors")


class InspectReport(ModelReport):
    """`duat inspect`."""

    command: Annotated[Literal["inspect"], COMMAND] = "inspect"
    environment: Annotated[Environment, _MACHINE]
    prompts: Annotated[list[PromptFacts], WHICH]
    prompt_set: Annotated[PromptSetFacts | None, AS_SET] = None
    certificate: Certificate
    blocks: Annotated[list[Block], Meaning(drift="group")]
    terms: Annotated[list[UatTerm] | None, Meaning(needs="terms")] = Field(
        default=None, description="terms of the UAT sum at the last block's output; with --terms"
    )
    end_to_end: Annotated[EndToEnd | None, Meaning(needs="end_to_end")] = Field(
        default=None,
        description="coupling of the tokens of x_0 with those of the last block's output, through all blocks and the "
        "residual path, mean over the prompts; with --end-to-end",
    )
    maps: Annotated[list[CouplingMap] | None, Meaning(needs="maps", checked=False)] = Field(
        default=None,
        description="coupling matrices C, token by token, of the blocks under the first prompts; with --maps",
    )
    summary: Annotated[Summary, Meaning(drift="group", rule="drift.summary")]
    skipped: list[Skipped]
    warnings: Warnings
    run: Annotated[Run, _MACHINE]


class InspectStacks(Report):
    """`duat inspect --stack all`: every stack of one model."""

    command: Annotated[Literal["inspect"], COMMAND] = "inspect"
    stacks: list[InspectReport] = Field(min_length=1, description="report of each stack, which `model.stack` names")


class BlockCertificate(Result):
    """Errors of one block: how far the values that duat rebuilds are from the model's own."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    certificate_error: Annotated[Finite, REBUILT] = Field(
        description="largest relative error of the block's rebuilt output and FFN inputs against the model's own, of "
        "all tokens together or of the worst token, over the prompts"
    )
    operator_error: Annotated[Finite | None, PROVED] = Field(
        description="largest relative error of the factors of W' over the prompts; null where W' has none"
    )
    operator_reason: str | None = Field(description="why `operator_error` is null")
    cross_error: Annotated[Finite | None, PROVED] = Field(
        default=None,
        description="largest relative error of the factors of W'_c, the operator of cross-attention or of a mixer "
        "beside attention, over the prompts; null where it has none, and in blocks without W'_c",
    )
    cross_reason: str | None = Field(default=None, description="why `cross_error` is null in a block with a W'_c")


class VerifyReport(ModelReport):
    """`duat verify`: the certificate alone."""

    command: Annotated[Literal["verify"], COMMAND] = "verify"
    prompts: list[PromptFacts]
    certificate: Certificate
    blocks: list[BlockCertificate]
    skipped: list[Skipped]
    warnings: Warnings
    run: Run


class VerifyStacks(Report):
    """`duat verify --stack all`: every stack of one model."""

    command: Annotated[Literal["verify"], COMMAND] = "verify"
    stacks: list[VerifyReport] = Field(min_length=1, description="report of each stack, which `model.stack` names")
