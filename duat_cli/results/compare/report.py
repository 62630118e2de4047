"""The report of `duat compare`."""

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
    Skipped,
    Warnings,
    WithReasons,
)
from duat_cli.results.compare.patching import Patching
from duat_cli.results.meaning import Meaning

_READ = "sum over question i and demonstration j of |B_ij|_F^2 / sum over question i and all j of it"
_LOSS = "mean over the answer's tokens of -ln p(token | all in front of it)"
_W = "|W'_a|_F, over aligned tokens"
_SHARE = "sum over aligned i and unaligned j of |B_ij|_F^2 / sum over aligned i and all j of it"
_KL = Meaning(
    "nats", "exact", how="null where it is infinite", formula="sum_v p_v (ln p_v - ln q_v), p behind a, q behind b"
)


_INTERVAL_END = Meaning(
    "nats a token",
    "estimate",
    how="end of a 95 % interval over prompts",
    source="studentised bootstrap of paired differences, Efron & Tibshirani (1993)",
    signed=True,
)


def _split(formula: str) -> Meaning:
    return Meaning("relative", "exact", formula=formula, source="Eq. 5-10; H_h S split into differences of H and of S")


def _relative(what: str, source: str = "") -> Meaning:
    return Meaning(
        "relative", "exact", formula=f"|{what}_b - {what}_a| / |{what}_a|, over aligned tokens", source=source
    )


class HeadChange(WithReasons):
    """Change of one head's part (H_h S) (x) A_h^T of W', relative to its own norm under the first prompt."""

    head: int = Field(description="number of the head, from 0")
    relative: Annotated[
        Finite | None,
        Meaning("relative", "exact", formula="|(H_h S)_b - (H_h S)_a|_F / |(H_h S)_a|_F, over aligned tokens"),
    ] = Field(description="change of the head's part of W'")
    routing: Annotated[Finite | None, _split("|(H_b - H_a) S_a|_F / |H_a S_a|_F")] = Field(
        description="the part of it that lies in the attention weights H alone"
    )
    scale: Annotated[Finite | None, _split("|H_a (S_b - S_a)|_F / |H_a S_a|_F")] = Field(
        description="the part that lies in the scales S alone, of norms and output gates"
    )
    interaction: Annotated[Finite | None, _split("|(H_b - H_a) (S_b - S_a)|_F / |H_a S_a|_F")] = Field(
        description="the part that only the two together make"
    )
    unaligned: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"of one head: {_SHARE}")] = Field(
        description="share of the head's part that reads tokens without a partner, mean of the two prompts"
    )


class NullChange(WithReasons):
    """Change of W' with H uniform over the tokens that a row may see: the effect of positions and scales alone."""

    relative: Annotated[Finite | None, Meaning("relative", "exact", formula=f"|W'_b - W'_a|_F / {_W}; H uniform")] = (
        Field(description="change of W' where no attention was learned")
    )
    unaligned: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"{_SHARE}; H uniform")] = Field(
        description="share of W' on tokens without a partner, where no attention was learned"
    )


class InputChange(WithReasons):
    """Change of a block's W' with the input; routing + scale + interaction, as matrices, are the difference."""

    relative: Annotated[
        Finite | None, Meaning("relative", "exact", formula=f"|W'_b - W'_a|_F / {_W}", source="Eq. 4, 10")
    ] = Field(description="change of W' between the two prompts, on the tokens that both have")
    routing: Annotated[Finite | None, _split(f"|sum_h ((H_h,b - H_h,a) S_a) (x) A_h^T|_F / {_W}")] = Field(
        description="the part that lies in the attention weights H alone: where tokens look"
    )
    scale: Annotated[Finite | None, _split(f"|sum_h (H_h,a (S_b - S_a)) (x) A_h^T|_F / {_W}")] = Field(
        description="the part that lies in S alone: scales of norms in front of attention and behind it, and output "
        "gates"
    )
    interaction: Annotated[Finite | None, _split(f"|sum_h ((H_h,b - H_h,a) (S_b - S_a)) (x) A_h^T|_F / {_W}")] = Field(
        description="the part that only the two together make"
    )
    unaligned: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean of a and b of {_SHARE}")] = (
        Field(
            description="share of W' that reads tokens without a partner in the other prompt, mean of the two prompts"
        )
    )
    unaligned_a: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=_SHARE)] = Field(
        description="of the first prompt alone"
    )
    unaligned_b: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=_SHARE)] = Field(
        description="of the second prompt alone"
    )
    null: NullChange


class FfnChange(WithReasons):
    """One FFN of a block."""

    module: str = Field(description="its name inside the block")
    relative: Annotated[Finite | None, _relative("f", "Eq. 11, 33")] = Field(
        description="change of its term f_j: the FFN's output without the bias of its last layer; where the block's "
        "own code runs the FFN's layers (BERT), what the nonlinearity gives"
    )


class BlockComparison(WithReasons):
    """One block, means over the pairs of prompts."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    operator: InputChange
    heads: list[HeadChange]
    bias: Annotated[Finite | None, _relative("b'_{j,2}", "Eq. 12, 34")] = Field(
        description="change of b'_{j,2}, whole: all that the FFN's nonlinearity reads beside the linear path from x_0; "
        "of a gated FFN, what its gate reads; of a mixture, what its shared expert reads, if it has one"
    )
    ffn: Annotated[Finite | None, _relative("f", "Eq. 11, 33")] = Field(
        description="change of the FFN's term f_j: its output without the bias of its last layer; where the block's "
        "own code runs the FFN's layers (BERT), what the nonlinearity gives; of several FFNs all as one vector"
    )
    ffns: list[FfnChange] = Field(description="of each FFN of the block, where it has several")
    input: Annotated[Finite | None, _relative("x_{j-1}")] = Field(description="change of the block's input")
    output: Annotated[Finite | None, _relative("x_j")] = Field(description="change of the block's output")
    amplification: Annotated[Finite | None, Meaning("times", "exact", formula="output / input")] = Field(
        description="relative change of the block's output over that of its input: above 1 the block drives the two "
        "prompts apart"
    )
    certificate_error: Annotated[
        Finite,
        Meaning(
            "relative",
            "measured",
            formula="max over prompts of |x_j - rebuilt_j| / |x_j|",
            source="Eq. 11/12, 33/34",
            over_prompts="largest",
        ),
    ] = Field(description="relative error of the block's rebuilt output against the model's own, larger of the two")


class ParameterChange(WithReasons):
    """One parameter of the sum: fixed by the checkpoint, or set by the input."""

    name: str = Field(
        description="its symbol: W, b, H and primes are the paper's; A_h, S, f_j and the parameters in words are duat's"
    )
    what: str = Field(description="what it is")
    set_by: Literal["checkpoint", "input"] = Field(description="what determines its value")
    moved: bool = Field(description="whether it differs between the prompts, in some block and pair")
    change: Annotated[
        Finite | None,
        Meaning("relative", "exact", formula="max over blocks and pairs of |p_b - p_a| / |p_a|, over aligned tokens"),
    ] = Field(description="largest relative change over blocks and pairs; 0 for what the checkpoint sets")


class InputComparison(Result):
    """Changes over all pairs."""

    pairs: int = Field(description="number of pairs of prompts")
    blocks: list[BlockComparison]
    parameters: list[ParameterChange] = Field(description="which parameters are fixed, and which moved")
    notable: list[str] = Field(description="sentences that the numbers support")


class AlignedRun(Result):
    """Compared tokens that follow one another in both prompts."""

    a: int = Field(description="place of its first token in the first prompt, from 0")
    b: int = Field(description="place of its first token in the second prompt")
    tokens: int = Field(description="number of tokens")
    text: str = Field(description="control characters escaped; long ones cut")
    text_b: str | None = Field(
        default=None, description="of the second prompt, where it has other tokens there; with --align position"
    )


class PairFacts(WithReasons):
    """Two prompts that were compared."""

    a: int = Field(description="number of the first prompt, from 0")
    b: int = Field(description="number of the second prompt")
    aligned: int = Field(
        description="tokens that are compared: the longest common subsequence of ids, special tokens last, or with "
        "--align position all; of pictures and sounds all positions that no mask leaves out"
    )
    runs: list[AlignedRun] = Field(description="the aligned tokens")
    kl: Annotated[Finite | None, _KL] = Field(
        description="KL(a || b) of the next-token distributions behind the last token, or of the classes of a "
        "classifier of whole inputs, nats"
    )
    blocks: Annotated[list[BlockComparison] | None, Meaning(needs="per_prompt")] = Field(
        default=None, description="of this pair alone; with --per-prompt"
    )


class ComparedPrompt(PromptFacts):
    """A compared prompt, with a label."""

    label: str = Field(description="where it comes from: an option or a line")


class FixedLoss(WithReasons):
    """Loss of the model with some dynamic parameters held."""

    held: Literal["H", "H and norms", "H, norms and routers"] = Field(
        description="what is held: attention weights; scales of norms as well; router weights as well, where experts "
        "take them as arguments"
    )
    source: Literal["own", "another prompt", "mean"] = Field(
        description="whose values: the prompt's own, those of the next prompt, or the mean over the prompts"
    )
    loss: Annotated[Finite, Meaning("nats a token", "exact", formula="mean over prompts and tokens of -ln p")] = Field(
        description="loss of the prompts' own tokens, mean over the prompts"
    )
    change: Annotated[
        Finite, Meaning("nats a token", "exact", formula="mean over prompts of loss - live loss", signed=True)
    ] = Field(description="loss less that of the live model")
    low: Annotated[Finite | None, _INTERVAL_END] = Field(description="lower end of the 95 % interval of change")
    high: Annotated[Finite | None, _INTERVAL_END] = Field(description="upper end of the 95 % interval of change")


class FixedParameters(Result):
    """Gain from dynamic parameters: losses with some of them held, the FFNs' nonlinearity live (UAT, DUAT)."""

    tokens: int = Field(description="of every prompt")
    live: Annotated[Finite, Meaning("nats a token", "exact", formula="mean over prompts and tokens of -ln p")] = Field(
        description="loss of the model as it is, mean over the prompts"
    )
    own_error: Annotated[
        Finite, Meaning("nats a token", "measured", formula="max over prompts of |loss with own values - live loss|")
    ] = Field(
        description="loss with parameters frozen at the prompt's own values, less the live model's: rounding alone"
    )
    tolerance: Annotated[Finite, Meaning("nats a token", "given")] = Field(description="the largest that passes")
    holds: bool = Field(description="own_error is at most the tolerance")
    runs: list[FixedLoss]


# -- demonstrations in front of a question: --shared --prefix --answer ------------------------------


class BlockRead(WithReasons):
    """One block's reading of one demonstration."""

    index: int = Field(description="number of the block, from 0")
    share: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=_READ, source="Eq. 10")] = Field(
        description="how much of W' on the question's tokens reads the demonstration"
    )
    null: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"{_READ}; H uniform")] = Field(
        description="the same share with uniform attention: what length, mask and scales alone make"
    )


class ContextRead(WithReasons):
    """One demonstration in one run."""

    demonstration: int = Field(description="number of the --prefix, from 1")
    tokens: int = Field(description="how many tokens it has there")
    share: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean over blocks of: {_READ}")] = Field(
        description="how much of W' on the question reads it, mean over the blocks that have a W'"
    )
    null: Annotated[
        Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean over blocks of: {_READ}; H uniform")
    ] = Field(description="the same share with uniform attention")
    blocks: list[BlockRead]


class ContextRun(WithReasons):
    """The question behind some demonstrations, or behind none."""

    prompt: int = Field(description="number of the prompt, from 0")
    label: str = Field(description="which demonstrations stand in front of the question")
    loss: Annotated[Finite | None, Meaning("nats a token", "exact", formula=_LOSS)] = Field(
        description="mean negative log likelihood of the answer's tokens, nats"
    )
    loss_change: Annotated[
        Finite | None, Meaning("nats a token", "exact", formula="loss - loss without demonstrations", signed=True)
    ] = Field(description="loss less that without demonstrations; below 0 they help")
    bias: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "exact",
            formula="mean over blocks of |b'_{j,2} - b'_{j,2} without demonstrations| / |the latter|, on the question",
            source="Eq. 12, 34; section 4.2",
        ),
    ] = Field(description="how far they move b'_{j,2} on the question, mean over the blocks where it is defined")
    reads: list[ContextRead] = Field(description="of each demonstration in front of the question")


class InContext(Result):
    """In-context learning (section 4.2): the effect of demonstrations on the answer, on W' and on b'_{j,2}."""

    question_tokens: int = Field(description="tokens of the question")
    answer_tokens: int = Field(description="tokens of the answer")
    runs: list[ContextRun] = Field(description="none, each, and all of the demonstrations")


# -- the report --------------------------------------------------------------------------------


class CompareReport(ModelReport):
    """`duat compare`: the changes with the input, block by block (Eq. 4)."""

    command: Annotated[Literal["compare"], COMMAND] = "compare"
    prompts: list[ComparedPrompt]
    certificate: Certificate
    comparison: InputComparison | None = Field(description="null with --fixed, which lays no prompts side by side")
    context: InContext | None = Field(default=None, description="what demonstrations do; with --answer")
    pairs: list[PairFacts]
    fixed: FixedParameters | None = Field(default=None, description="with --fixed")
    patched: Patching | None = Field(default=None, description="what parts of b do in a's pass; with --patch")
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
