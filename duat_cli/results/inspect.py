"""The reports of `duat inspect` and `duat verify`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
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

_COUPLING = Meaning(drift="group", rule="drift.coupling")
_MACHINE = Meaning(checked=False)
_SUM = "Eq. 11/12, 33/34"
_PARTS = Meaning(exactness="exact", source="Eq. 12, 34", drift="group")
_TERMS = Meaning(exactness="exact", source=_SUM, drift="group")
_ENCODER = Meaning(exactness="exact", source="Eq. 11/12 with the encoder's states as a second input", checked=False)
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
    Routing | None, Meaning(needs="routing", by_name=True), Field(description="where H comes from; with --routing")
]
_WithHeads = Annotated[
    Heads | None,
    Meaning(needs="heads", by_name=True),
    Field(description="what each attention head reads, by H alone; with --heads"),
]
_ERROR = Meaning(
    "relative",
    "measured",
    formula="max over prompts of |x_i - rebuilt_i| / |x_i|",
    source=_SUM,
    over_prompts="largest",
    better="lower",
)


class Range(WithReasons):
    """The largest activation of one block, against the dtype in which transformers loads the checkpoint."""

    largest_activation: Annotated[
        Finite | None, Meaning("as the activations", "measured", how="over these prompts", formula="max |a|")
    ] = Field(
        description="largest absolute value at the output of a norm, of attention, of an FFN unit or of the block, "
        "over tokens and prompts; not of what is inside them, such as attention scores"
    )
    place: Literal["norm", "attention", "ffn", "block"] = Field(description="whose output it is")
    stored_dtype: str | None = Field(
        description="dtype of most stored bytes, of quantised weights the one that config.json states; null where that "
        "is not known"
    )
    dtype: str | None = Field(
        default=None,
        description="dtype in which transformers loads the checkpoint: the one that config.json states for the whole "
        "model, else stored_dtype; null in reports of old versions, which compare with stored_dtype",
    )
    share: Annotated[
        Finite | None,
        Meaning(
            "times the largest number of the dtype",
            "measured",
            how="over these prompts",
            formula="largest_activation / largest number of dtype",
        ),
    ] = Field(
        description="largest_activation / largest number of dtype: above 1 the checkpoint overflows as transformers "
        "loads it. Where that is float16 or float8; no activation comes near the largest number of the others"
    )


class Part(WithReasons):
    share: Annotated[
        Finite | None, Meaning("share", "exact", formula="<part, x> / |x|^2", source=_SUM, signed=True, drift="number")
    ] = Field(description="what it makes of the whole; the shares of a place sum to 1")
    norm: Annotated[
        Finite | None, Meaning("relative", "exact", formula="|part| / |x|", source=_SUM, drift="number")
    ] = Field(description="its length, relative to the whole")


class Parts(Result):
    """One vector split into the paper's three parts. Each covers all blocks up to here, not this one alone."""

    linear: Annotated[Part, _PARTS] = Field(description="the linear path from x_0, the first block's input")
    static: Annotated[Part, _PARTS] = Field(
        description="all biases, the FFN's output bias among them; carried by T, which the input sets, so it moves "
        "between prompts as well"
    )
    dynamic: Annotated[Part, _PARTS] = Field(
        description="the UAT terms of this block and all before it; at a pre-activation, the part of the bias b'_{j,2} "
        "of Eq. 12/34 that the UAT terms make (its rest, W' b'_{j-1,3} + b, is in `static`)"
    )
    encoder: Annotated[Part | None, _ENCODER] = Field(
        default=None, description="as of the block's output; in a decoder, null in other stacks"
    )


class Terms(WithReasons):
    """The paper's sum at one block: shares of its output, of all terms up to here, and the block's own term."""

    linear: Annotated[Part, _TERMS] = Field(
        description="of all up to here: the linear path from x_0, the first block's input"
    )
    static: Annotated[Part, _TERMS] = Field(
        description="of all up to here: the biases, carried by T, which the input sets"
    )
    dynamic: Annotated[Part, _TERMS] = Field(
        description="of all up to here: the UAT terms of this block and all before it"
    )
    encoder: Annotated[Part | None, _ENCODER] = Field(
        default=None,
        description="of all up to here: the encoder's states, through the cross-attention of this block and all before "
        "it, H held; its biases are in `static`. In a decoder (--stack decoder); with pictures in a text, what "
        "the vision part adds to the stream between blocks; else null",
    )
    own: Annotated[Part, Meaning(exactness="exact", source=_SUM)] = Field(
        description="this block's own UAT term U_j f_j in its output: a part of `dynamic`, the FFN's output bias not "
        "among it"
    )
    pre_activation: Annotated[Parts | None, _PARTS] = Field(
        description="the three parts at the FFN's first linear layer; of a mixture of experts, that of the expert that "
        "every token runs through"
    )


class Spread(Result):
    """One value over the prompts, in its own unit."""

    low: Annotated[Finite, Meaning("the field's", signed=True)] = Field(description="the smallest over the prompts")
    mean: Annotated[Finite, Meaning("the field's", signed=True)] = Field(description="mean over the prompts")
    high: Annotated[Finite, Meaning("the field's", signed=True)] = Field(description="the largest over the prompts")
    standard_deviation: Annotated[Finite, Meaning("the field's")] = Field(
        description="standard deviation over the prompts"
    )


class PromptBlock(Result):
    """One block under one prompt."""

    prompt: int = Field(description="number of the prompt, from 0")
    operator: OperatorStats
    density: Density
    coupling: Coupling
    coupling_weighted: Coupling
    null: Annotated[Nulls, Meaning(by_name=True)]
    terms: Terms
    cross: _Cross = None
    certificate_error: Annotated[Finite, replace(_ERROR, formula="|x_i - rebuilt_i| / |x_i|")] = Field(
        description="relative error of the block's rebuilt output against the model's own"
    )
    routing: _WithRouting = None
    heads: _WithHeads = None


class Block(Result):
    """One block, means over the prompts."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    operator: Annotated[OperatorStats, Meaning(drift="group", rule="drift.operator")]
    density: Annotated[Density, Meaning(drift="group", rule="drift.density")]
    coupling: Annotated[Coupling, _COUPLING] = Field(description="by |B_ij|_F")
    coupling_weighted: Annotated[Coupling, _COUPLING] = Field(description="by |B_ij x_j|")
    null: Annotated[Nulls, Meaning(by_name=True)] = Field(description="the same statistics where nothing was learned")
    terms: Annotated[Terms, Meaning(drift="group", rule="drift.terms")]
    cross: _Cross = None
    certificate_error: Annotated[Finite, _ERROR] = Field(description="largest over prompts of |x_i - rebuilt| / |x_i|")
    range: Range
    routing: _WithRouting = None
    heads: _WithHeads = None
    spreads: Annotated[dict[str, Spread] | None, Meaning(needs="per_prompt", keyed_by=PromptBlock)] = Field(
        default=None, description="with --per-prompt: 'group.field' to its spread over the prompts"
    )
    prompts: Annotated[list[PromptBlock] | None, Meaning(needs="per_prompt")] = Field(
        default=None, description="with --per-prompt"
    )


class UatTerm(Result):
    """One term of the UAT sum at the last block's output, means over the prompts."""

    name: str = Field(description="'x_0', 'bias', 'encoder', or the block whose FFN makes the term")
    kind: Literal["linear", "static", "dynamic", "encoder"] = Field(
        description="which of the parts of the sum it belongs to"
    )
    block: int | None = Field(description="number of the block, from 0; null for what no FFN makes")
    share: Annotated[
        Finite, Meaning("share", "exact", formula="<term, x_L> / |x_L|^2", source="Eq. 11, 33", signed=True)
    ] = Field(description="what it makes of the output; all shares sum to 1")
    norm: Annotated[Finite, Meaning("relative", "exact", formula="|term| / |x_L|", source="Eq. 11, 33")] = Field(
        description="its length, relative to the output"
    )


class Summary(WithReasons):
    """The most important numbers, and sentences based on them."""

    linear_share: Annotated[Finite | None, _TOTAL] = Field(
        description="of all up to the last block's output, mean over prompts"
    )
    static_share: Annotated[Finite | None, _TOTAL] = Field(description="of all up to the last block's output")
    dynamic_share: Annotated[Finite | None, _TOTAL] = Field(description="of all up to the last block's output")
    encoder_share: Annotated[Finite | None, _ENCODER_SHARE] = Field(
        default=None, description="of all up to the last block's output; in a decoder, null in other stacks"
    )
    effective_context: Annotated[Finite | None, Meaning("tokens", "exact", drift="number")] = Field(
        description="mean over blocks, tokens"
    )
    structural_density: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", drift="number")] = Field(
        description="mean over blocks"
    )
    notable: list[str] = Field(description="at most three sentences that the numbers support")


class EndToEndNulls(WithReasons):
    """Nulls of the end-to-end coupling, in which attention has learned nothing."""

    uniform: Coupling | None = Field(
        description="every block's H uniform over the tokens that each row may see; weights and norm scales the same"
    )
    reinitialised: Annotated[Coupling | None, Meaning(checked=False)] = Field(
        description="the same architecture re-initialised: none yet, for the reason beside it"
    )


class EndToEnd(Result):
    """Coupling of the tokens of x_0 with those of the last block's output, through all blocks and the residual path."""

    coupling: Coupling = Field(
        description="by c_ij = |(T_L...T_1)(e_j (x) x_0[j])_i| in place of C_ij: the linear path alone, dynamic "
        "parameters frozen; the other terms of the sum start in the blocks and are no part of it"
    )
    null: EndToEndNulls = Field(description="the same numbers where nothing was learned")
    certificate_error: Annotated[
        Finite, replace(_ERROR, formula="|sum_j (T_L...T_1)(e_j (x) x_0[j]) - (T_L...T_1) x_0| / |the latter|")
    ] = Field(description="how far the source tokens' parts together are from the linear part of the output")


class BlockMap(Result):
    """The coupling matrix C of one block under one prompt."""

    index: int = Field(description="number of the block, from 0")
    coupling: Annotated[
        list[list[Finite]],
        Meaning("norm of W'", "exact", how="four digits are kept", formula="C_ij = |B_ij|_F", source="Eq. 10"),
    ] = Field(description="C, a row a token i, in it from token j to token i, j from 0, less the zeros at its end")


class CouplingMap(Result):
    """Coupling of the first tokens of one prompt with each other through W', block by block."""

    prompt: int = Field(description="number of the prompt, from 0")
    total_tokens: int = Field(description="how many tokens the prompt has")
    tokens: list[str] = Field(description="the tokens mapped, what each says alone: the prompt's first")
    blocks: list[BlockMap] = Field(description="blocks whose W' has factors")


class InspectReport(ModelReport):
    """`duat inspect`."""

    command: Annotated[Literal["inspect"], COMMAND] = "inspect"
    environment: Annotated[Environment, _MACHINE]
    prompts: Annotated[list[PromptFacts], WHICH]
    prompt_set: Annotated[PromptSetFacts | None, AS_SET] = None
    certificate: Certificate
    blocks: Annotated[list[Block], Meaning(drift="group")]
    terms: Annotated[list[UatTerm] | None, Meaning(needs="terms")] = Field(default=None, description="with --terms")
    end_to_end: Annotated[EndToEnd | None, Meaning(needs="end_to_end")] = Field(
        default=None, description="mean over the prompts; with --end-to-end"
    )
    maps: Annotated[list[CouplingMap] | None, Meaning(needs="maps", checked=False)] = Field(
        default=None, description="the coupling C token by token, of the first prompts; with --maps"
    )
    summary: Annotated[Summary, Meaning(drift="group", rule="drift.summary")]
    skipped: list[Skipped]
    warnings: Warnings
    run: Annotated[Run, _MACHINE]


class InspectStacks(Report):
    """`duat inspect --stack all`: every stack of one model."""

    command: Annotated[Literal["inspect"], COMMAND] = "inspect"
    stacks: list[InspectReport] = Field(min_length=1, description="a report a stack, which `model.stack` names")


class BlockCertificate(Result):
    """Errors of one block: how far the values that duat rebuilds are from the model's own."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    certificate_error: Annotated[Finite, _ERROR] = Field(
        description="relative error of the block's rebuilt output against the model's own"
    )
    operator_error: Annotated[Finite | None, PROVED] = Field(
        description="of the factors of W'; null where they are not Kronecker"
    )
    operator_reason: str | None = Field(description="why operator_error is null")
    cross_error: Annotated[Finite | None, PROVED] = Field(
        default=None,
        description="of the factors of W'_c, the operator of cross-attention or of a mixer beside attention; null "
        "where they are not Kronecker, and in blocks with neither",
    )
    cross_reason: str | None = Field(
        default=None, description="why cross_error is null where there is such an operator"
    )


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
    stacks: list[VerifyReport] = Field(min_length=1, description="a report a stack, which `model.stack` names")
