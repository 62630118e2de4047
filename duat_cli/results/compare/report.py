"""The report of `duat compare`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
    REBUILT,
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


def _of_tokens(what: str) -> Meaning:
    return Meaning("relative", "exact", formula=f"mean over aligned tokens of |{what}_b - {what}_a| / |{what}_a|")


class HeadChange(WithReasons):
    """Change of one head's part (H_h S) (x) A_h^T of W', relative to its own norm under the first prompt."""

    head: int = Field(description="number of the head, from 0")
    relative: Annotated[
        Finite | None,
        Meaning("relative", "exact", formula="|(H_h S)_b - (H_h S)_a|_F / |(H_h S)_a|_F, over aligned tokens"),
    ] = Field(description="change of the head's part of W' between the two prompts, on the aligned tokens")
    routing: Annotated[Finite | None, _split("|(H_b - H_a) S_a|_F / |H_a S_a|_F")] = Field(
        description="part of one head's change in W' that lies in its attention weights H alone"
    )
    scale: Annotated[Finite | None, _split("|H_a (S_b - S_a)|_F / |H_a S_a|_F")] = Field(
        description="part of one head's change in W' that lies in the scales S alone, of norms and output gates"
    )
    interaction: Annotated[Finite | None, _split("|(H_b - H_a) (S_b - S_a)|_F / |H_a S_a|_F")] = Field(
        description="part of one head's change in W' that only H and S together make"
    )
    unaligned: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"of one head: {_SHARE}")] = Field(
        description="share of the head's part of W' that reads tokens without a partner in the other prompt, mean of "
        "the two prompts"
    )


class NullChange(WithReasons):
    """Change of W' with H uniform over the tokens that a row may see: the effect of positions and scales alone."""

    relative: Annotated[Finite | None, Meaning("relative", "exact", formula=f"|W'_b - W'_a|_F / {_W}; H uniform")] = (
        Field(description="change of W' between the two prompts with uniform attention: where no attention was learned")
    )
    unaligned: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"{_SHARE}; H uniform")] = Field(
        description="share of W' with uniform attention that reads tokens without a partner in the other prompt, mean "
        "of the two prompts"
    )


class InputChange(WithReasons):
    """Change of a block's W' with the input; routing + scale + interaction, as matrices, are the difference."""

    relative: Annotated[
        Finite | None, Meaning("relative", "exact", formula=f"|W'_b - W'_a|_F / {_W}", source="Eq. 4, 10")
    ] = Field(description="change of W' between the two prompts, on the aligned tokens")
    routing: Annotated[Finite | None, _split(f"|sum_h ((H_h,b - H_h,a) S_a) (x) A_h^T|_F / {_W}")] = Field(
        description="part of the change of W' that lies in the attention weights H alone: where tokens look"
    )
    scale: Annotated[Finite | None, _split(f"|sum_h (H_h,a (S_b - S_a)) (x) A_h^T|_F / {_W}")] = Field(
        description="part of the change of W' that lies in S alone: scales of norms in front of attention and behind "
        "it, and output gates"
    )
    interaction: Annotated[Finite | None, _split(f"|sum_h ((H_h,b - H_h,a) (S_b - S_a)) (x) A_h^T|_F / {_W}")] = Field(
        description="part of the change of W' that only H and S together make"
    )
    unaligned: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean of a and b of {_SHARE}")] = (
        Field(
            description="share of W' that reads tokens without a partner in the other prompt, mean of the two prompts"
        )
    )
    unaligned_a: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=_SHARE)] = Field(
        description="share of W' under the first prompt that reads tokens without a partner in the second"
    )
    unaligned_b: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=_SHARE)] = Field(
        description="share of W' under the second prompt that reads tokens without a partner in the first"
    )
    null: NullChange


class CrossChange(InputChange):
    """Change with the input of W'_c, through which a decoder's tokens read those of the encoder."""

    heads: list[HeadChange] = Field(description="changes of each head's part of W'_c")


class FfnChange(WithReasons):
    """One FFN of a block."""

    module: str = Field(description="name of the FFN's module inside the block")
    relative: Annotated[Finite | None, _relative("f", "Eq. 11, 33")] = Field(
        description="change of one FFN's term f_j: its output without the bias of its last layer; where the block's "
        "own code runs the FFN's layers (BERT), what the nonlinearity gives"
    )


class BlockComparison(WithReasons):
    """Changes of each block between the two prompts, means over the pairs."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    operator: InputChange
    heads: list[HeadChange]
    cross: CrossChange | None = Field(
        default=None,
        description="change of W'_c, between the decoder's aligned tokens and the aligned tokens of what the encoder "
        "reads; null in blocks without cross-attention",
    )
    bias: Annotated[Finite | None, _relative("b'_{j,2}", "Eq. 12, 34")] = Field(
        description="change of b'_{j,2}, whole: all that the FFN's nonlinearity reads beside the linear path from x_0; "
        "of a gated FFN, what its gate reads; of a mixture, what its shared expert reads, if it has one"
    )
    ffn: Annotated[Finite | None, _relative("f", "Eq. 11, 33")] = Field(
        description="change of the FFN's term f_j: its output without the bias of its last layer; where the block's "
        "own code runs the FFN's layers (BERT), what the nonlinearity gives; of several FFNs all as one vector"
    )
    ffns: list[FfnChange] = Field(
        description="changes of each FFN's term by itself, in a block of several FFNs; else empty"
    )
    input: Annotated[Finite | None, _of_tokens("x_{j-1}")] = Field(
        description="change of the block's input between the two prompts: of each aligned token by itself, so that one "
        "with massive activations counts as every other; the mean over them"
    )
    output: Annotated[Finite | None, _of_tokens("x_j")] = Field(
        description="change of the block's output between the two prompts, taken as that of its input"
    )
    amplification: Annotated[Finite | None, Meaning("times", "exact", formula="output / input")] = Field(
        description="change of the block's output over that of its input; null where the input changes by no more than "
        "rounding"
    )
    certificate_error: Annotated[Finite, REBUILT] = Field(
        description="relative error of the block's rebuilt output against the model's own, largest over the compared "
        "prompts"
    )


class ParameterChange(WithReasons):
    """One parameter of the sum: fixed by the checkpoint, or set by the input."""

    name: str = Field(
        description="symbol of the parameter: W, b, H and primes are the paper's; A_h, S, f_j and the parameters in "
        "words are duat's"
    )
    what: str = Field(description="what the parameter is")
    set_by: Literal["checkpoint", "input"] = Field(
        description="what determines the parameter's value: the checkpoint or the input"
    )
    moved: bool = Field(description="whether the parameter differs between the prompts, in some block and pair")
    change: Annotated[
        Finite | None,
        Meaning("relative", "exact", formula="max over blocks and pairs of |p_b - p_a| / |p_a|, over aligned tokens"),
    ] = Field(
        description="largest relative change of the parameter over blocks and pairs; 0 for what the checkpoint sets"
    )


class InputComparison(Result):
    """Changes over all pairs."""

    pairs: int = Field(description="number of pairs of prompts that are compared")
    blocks: list[BlockComparison]
    parameters: list[ParameterChange] = Field(
        description="parameters of the sum, which the checkpoint fixes or the input sets, and how far they moved"
    )
    notable: list[str] = Field(description="sentences that the numbers support")


class AlignedRun(Result):
    """Compared tokens that follow one another in both prompts."""

    a: int = Field(description="place of the run's first token in the first prompt, from 0")
    b: int = Field(description="place of the run's first token in the second prompt, from 0")
    tokens: int = Field(description="number of tokens of the run")
    text: str = Field(description="text of the run in the first prompt, control characters escaped; long ones cut")
    text_b: str | None = Field(
        default=None,
        description="text of the run in the second prompt, where that has other tokens there, with --align position "
        "or --patch; else null",
    )


class PairFacts(WithReasons):
    """Two prompts that were compared."""

    a: int = Field(description="number of the first prompt, from 0")
    b: int = Field(description="number of the second prompt, from 0")
    aligned: int = Field(
        description="number of tokens that are compared: those of the longest common subsequence of ids, special "
        "tokens last; those of the shared text with --shared; all with --align position or --patch; of pictures and "
        "sounds all positions that no mask leaves out"
    )
    runs: list[AlignedRun] = Field(
        description="aligned tokens, as runs of those that follow one another in both prompts"
    )
    kl: Annotated[Finite | None, _KL] = Field(
        description="divergence KL(a || b) of the next-token distributions behind the last tokens of the two prompts, "
        "or of the classes of a classifier of whole inputs; null for other models"
    )
    blocks: Annotated[list[BlockComparison] | None, Meaning(needs="per_prompt")] = Field(
        default=None,
        description="changes of each block between the two prompts of this pair alone; null without --per-prompt",
    )


class ComparedPrompt(PromptFacts):
    """A compared prompt, with a label."""

    label: str = Field(description="origin of the prompt, such as an option or a line of a file")


class FixedLoss(WithReasons):
    """Losses of the model with some dynamic parameters held, one for each choice of parameters and values."""

    held: Literal["H", "H and norms", "H, norms and routers"] = Field(
        description="which dynamic parameters are held: attention weights; scales of norms as well; router weights as "
        "well, where experts take them as arguments"
    )
    source: Literal["own", "another prompt", "mean"] = Field(
        description="origin of the held parameters' values: the prompt's own, those of the next prompt, or the mean "
        "over the prompts"
    )
    loss: Annotated[
        Finite | None, Meaning("nats a token", "exact", formula="mean over prompts and tokens of -ln p")
    ] = Field(
        description="loss of the prompts' own tokens with the parameters held, mean over the prompts; null where the "
        "model overflows with them"
    )
    change: Annotated[
        Finite | None, Meaning("nats a token", "exact", formula="mean over prompts of loss - live loss", signed=True)
    ] = Field(description="loss with the parameters held, less that of the live model")
    low: Annotated[Finite | None, _INTERVAL_END] = Field(
        description="lower end of the 95 % interval of `change`; null for fewer than 5 prompts, or where many differ "
        "by the same"
    )
    high: Annotated[Finite | None, _INTERVAL_END] = Field(
        description="upper end of the 95 % interval of `change`; null for fewer than 5 prompts, or where many differ "
        "by the same"
    )


class FixedParameters(Result):
    """Gain from dynamic parameters: losses with some of them held, the FFNs' nonlinearity live (UAT, DUAT)."""

    tokens: int = Field(description="number of tokens of every prompt")
    live: Annotated[Finite, Meaning("nats a token", "exact", formula="mean over prompts and tokens of -ln p")] = Field(
        description="loss of the model as it is, mean over the prompts"
    )
    own_error: Annotated[
        Finite, Meaning("nats a token", "measured", formula="max over prompts of |loss with own values - live loss|")
    ] = Field(
        description="largest difference over prompts between the loss with parameters held at the prompt's own values "
        "and the live loss: rounding alone"
    )
    tolerance: Annotated[Finite, Meaning("nats a token", "given")] = Field(
        description="largest `own_error` that passes"
    )
    holds: bool = Field(description="whether `own_error` is at most the tolerance")
    runs: list[FixedLoss]


# -- demonstrations in front of a question: --shared --prefix --answer ------------------------------


class BlockRead(WithReasons):
    """Share of each block's W' that reads one demonstration."""

    index: int = Field(description="number of the block, from 0")
    share: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=_READ, source="Eq. 10")] = Field(
        description="share of W' on the question's tokens, in one block, that reads the demonstration"
    )
    null: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"{_READ}; H uniform")] = Field(
        description="share of W' on the question's tokens, in one block, that would read the demonstration with "
        "uniform attention: what length, mask and scales alone make"
    )


class ContextRead(WithReasons):
    """One demonstration in one run."""

    demonstration: int = Field(description="number of the demonstration, of the --prefix, from 1")
    tokens: int = Field(description="number of tokens of the demonstration in this run")
    share: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean over blocks of: {_READ}")] = Field(
        description="share of W' on the question's tokens that reads the demonstration, mean over the blocks that "
        "have a W'"
    )
    null: Annotated[
        Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean over blocks of: {_READ}; H uniform")
    ] = Field(
        description="share of W' on the question's tokens that would read the demonstration with uniform attention, "
        "mean over the blocks that have a W'"
    )
    blocks: list[BlockRead]


class ContextRun(WithReasons):
    """The question behind some demonstrations, or behind none."""

    prompt: int = Field(description="number of the prompt, from 0")
    label: str = Field(description="which demonstrations stand in front of the question")
    loss: Annotated[Finite | None, Meaning("nats a token", "exact", formula=_LOSS)] = Field(
        description="mean negative log likelihood of the answer's tokens behind these demonstrations and the "
        "question; null where it is infinite, or where the model predicts no next token"
    )
    loss_change: Annotated[
        Finite | None, Meaning("nats a token", "exact", formula="loss - loss without demonstrations", signed=True)
    ] = Field(description="loss of the answer behind these demonstrations, less that without any; below 0 they help")
    bias: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "exact",
            formula="mean over blocks of |b'_{j,2} - b'_{j,2} without demonstrations| / |the latter|, on the question",
            source="Eq. 12, 34; section 4.2",
        ),
    ] = Field(
        description="how far these demonstrations move b'_{j,2} on the question's tokens, mean over the blocks where "
        "it is defined"
    )
    reads: list[ContextRead] = Field(
        description="how much of W' on the question reads each demonstration in front of it"
    )


class InContext(Result):
    """In-context learning (section 4.2): the effect of demonstrations on the answer, on W' and on b'_{j,2}."""

    question_tokens: int = Field(description="number of tokens of the question")
    answer_tokens: int = Field(description="number of tokens of the answer")
    runs: list[ContextRun] = Field(description="runs of the question behind none, each, and all of the demonstrations")


# -- the report --------------------------------------------------------------------------------


class CompareReport(ModelReport):
    """`duat compare`: the changes with the input, block by block (Eq. 4)."""

    command: Annotated[Literal["compare"], COMMAND] = "compare"
    prompts: list[ComparedPrompt]
    certificate: Certificate
    comparison: InputComparison | None = Field(
        description="changes between the two prompts of each pair; null with --fixed, which lays no prompts side by "
        "side"
    )
    context: InContext | None = Field(
        default=None, description="effect of demonstrations on a question's answer, with --answer; else null"
    )
    pairs: list[PairFacts]
    fixed: FixedParameters | None = Field(
        default=None, description="losses with dynamic parameters held, with --fixed; else null"
    )
    patched: Patching | None = Field(
        default=None,
        description="effects of parts of the second prompt in the first prompt's pass, with --patch; else null",
    )
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
