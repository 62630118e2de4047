"""The report of `duat lora-diff`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
    REBUILT,
    Certificate,
    Environment,
    Finite,
    ModelFacts,
    PromptFacts,
    Report,
    Result,
    Run,
    Skipped,
    Warnings,
    WithReasons,
)
from duat_cli.results.meaning import Meaning
from duat_cli.results.prompts import AS_SET, LISTED, WHICH, PromptSetFacts
from duat_cli.results.weight_change import Comparison, KindChange, ModuleChange

_PROMPTS = Meaning(needs="prompts")
_TOLERANCE = Meaning("relative", "given")
_TYPICAL = Meaning("relative", "exact", formula="median over t of |x_t' - x_t| / |x_t|")


def _of_operator(formula: str) -> Meaning:
    return Meaning("relative", "exact", formula=formula, source="Eq. 10, 17")


class LintFinding(Result):
    """Finding of the adapter's linter: an error, a warning or a note."""

    rule: str = Field(description="id of the linter's rule, such as target-absent")
    level: Literal["error", "warning", "note"] = Field(description="severity of the linter's finding")
    where: str = Field(description="adapter, file, module or parameter that the linter's finding is about")
    message: str = Field(description="what was found, in words")


class OperatorChange(WithReasons):
    """Change of one block's W' from base to tuned model, relative to |W'_base|_F; `routing`, `weights` and
    `interaction` add up, as matrices, to the whole change."""

    relative_change: Annotated[Finite | None, _of_operator("|W'_tuned - W'_base|_F / |W'_base|_F")] = Field(
        description="change of a block's W' from base to tuned model, relative to |W'_base|_F"
    )
    routing: Annotated[Finite | None, _of_operator("|sum_h (H'_h S' - H_h S) (x) A_h^T|_F / |W'_base|_F")] = Field(
        description="part of the change of a block's W' that lies in what attention looks at, scales of norms included"
    )
    weights: Annotated[Finite | None, _of_operator("|sum_h (H_h S) (x) (A'_h - A_h)^T|_F / |W'_base|_F")] = Field(
        description="part of the change of a block's W' that lies in what attention carries, its values and outputs"
    )
    interaction: Annotated[
        Finite | None, _of_operator("|sum_h (H'_h S' - H_h S) (x) (A'_h - A_h)^T|_F / |W'_base|_F")
    ] = Field(description="part of the change of a block's W' that only `routing` and `weights` together make")


class TermsChange(WithReasons):
    """Changes of one block's FFN, dynamic bias and output from base to tuned model, relative to the base."""

    ffn: Annotated[Finite | None, Meaning("relative", "exact", formula="|f' - f| / |f|", source="Eq. 11, 18")] = Field(
        description="relative change of f, what a block's FFN adds to the residual stream: behind its own last layer, "
        "bias included, and a norm and a factor of its own, in front of any norm on the stream. The UAT term of the "
        "sum is f without the biases, which count as static; several FFNs in a block are taken as one vector"
    )
    dynamic_bias: Annotated[
        Finite | None,
        Meaning("relative", "exact", formula="|dynamic part' - dynamic part| / |pre-activation|", source="Eq. 12, 34"),
    ] = Field(
        description="change of the dynamic part in front of an FFN's nonlinearity, to the base's whole pre-activation"
    )
    output: Annotated[Finite | None, Meaning("relative", "exact", formula="|x' - x| / |x|")] = Field(
        description="relative change of a block's output from base to tuned model, over all tokens"
    )
    output_token_median: Annotated[Finite | None, _TYPICAL] = Field(
        default=None,
        description="change of a block's output at a typical token, the median over the tokens: `output` may be that "
        "of one token with massive activations. Null also in reports of old versions",
    )


class BlockChange(Result):
    """Changes of one block's W', FFN and output from base to tuned model, means over the prompts."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    operator: OperatorChange
    cross: OperatorChange | None = Field(
        default=None,
        description="change of W'_c, through which a decoder's tokens read those of the encoder; null in blocks "
        "without cross-attention",
    )
    terms: TermsChange
    base_certificate: Annotated[Finite, REBUILT] = Field(
        description="relative error of a block's rebuilt output against the base's own, largest over the prompts"
    )
    tuned_certificate: Annotated[Finite, REBUILT] = Field(
        description="relative error of a block's rebuilt output against the tuned model's own, largest over prompts"
    )


class TokenChange(Result):
    position: int = Field(description="place of the token in the prompt, from 0")
    text: str = Field(description="the token, control characters escaped")
    kl: Annotated[
        Finite, Meaning("nats", "exact", formula="sum_v p_v (ln p_v - ln q_v), p of the base, q of the tuned model")
    ] = Field(description="KL(base || tuned) of what is predicted at one token, the next token or a class")


class AnswerChange(WithReasons):
    """Change on what the model itself says in a conversation: only on the tokens of assistant messages' contents, each
    predicted from everything in front of it."""

    tokens: Annotated[int, Meaning("count", "exact")] = Field(
        description="number of tokens of the model's own messages in one conversation that are predicted"
    )
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="mean over these tokens, as of the prompt")] = Field(
        description="mean of KL(base || tuned) where the tokens of the model's own messages in one conversation are "
        "predicted; null where it is not finite"
    )
    loss_base: Annotated[
        Finite | None, Meaning("nats", "exact", formula="mean over these tokens of -ln p(the token)")
    ] = Field(description="the base's mean negative log likelihood of the tokens of the model's own messages")
    loss_tuned: Annotated[
        Finite | None, Meaning("nats", "exact", formula="mean over these tokens of -ln q(the token)")
    ] = Field(description="the tuned model's mean negative log likelihood of the tokens of the model's own messages")


class PromptChange(WithReasons):
    """Change of the predictions on one prompt."""

    prompt: int = Field(description="number of the prompt, from 0")
    output: Annotated[Finite, Meaning("relative", "exact", formula="|x_L' - x_L| / |x_L|")] = Field(
        description="relative change of the last block's output x_L under one prompt"
    )
    kl: Annotated[
        Finite | None,
        Meaning(
            "nats",
            "exact",
            how="null where it is infinite",
            formula="mean over tokens of sum_v p_v (ln p_v - ln q_v), p of the base, q of the tuned model",
        ),
    ] = Field(
        description="KL(base || tuned) of the predictions on one prompt, mean over its tokens without the positions of "
        "pictures, videos and sounds in a text; of a classifier of texts, pictures or sounds, the KL of its classes"
    )
    loss_base: Annotated[Finite | None, Meaning("nats", "exact", formula="mean over tokens of -ln p(next token)")] = (
        Field(description="the base's mean negative log likelihood of the prompt's own tokens")
    )
    loss_tuned: Annotated[Finite | None, Meaning("nats", "exact", formula="mean over tokens of -ln q(next token)")] = (
        Field(description="the tuned model's mean negative log likelihood of the prompt's own tokens")
    )
    answer: AnswerChange | None = Field(
        default=None,
        description="change on the model's own messages in a conversation; null where the prompt shows none, and where "
        "no next token is predicted",
    )
    moved_tokens: list[TokenChange] = Field(
        description="tokens of the prompt where the prediction moved most, by KL, at most 5"
    )


class Eq18(WithReasons):
    """Test of Eq. 18, W'_tuned = W'_base + dW, on the linear layers of the FFNs, which it is about.

    On the tuned run's own inputs x, each layer must give y = W_base x + dW x + b, with dW from the adapter's factors or
    from the difference of the files.
    """

    statement: str = Field(description="the equation that was tested, as a formula")
    relative_error: Annotated[
        Finite | None,
        Meaning(
            "relative", "measured", formula="max over layers of |y - (W_base x + dW x + b)| / |y|", source="Eq. 17, 18"
        ),
    ] = Field(
        description="error of the sum that Eq. 18 states, relative to y, what the tuned model made of the layer's "
        "input x; largest over the tested layers"
    )
    tolerance: Annotated[Finite, _TOLERANCE] = Field(
        description="the most that `relative_error` may be in a layer for which Eq. 18 holds"
    )
    change_error: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "measured",
            how="in float64",
            formula="max over layers of |(W_tuned - W_base - dW) x| / |dW x|",
            source="Eq. 17, 18",
        ),
    ] = Field(
        description="error of dW alone on the inputs x of a layer, relative to dW x; largest over the tested layers"
    )
    change_tolerance: Annotated[Finite, _TOLERANCE] = Field(
        description="the most that `change_error` may be in a layer for which Eq. 18 holds"
    )
    holds: bool | None = Field(
        description="whether both errors of every layer tested for Eq. 18 are within their tolerances; null where none "
        "was tested"
    )
    inputs: int = Field(description="number of input vectors that a layer was tested on, at most")
    failed: list[str] = Field(description="layers for which Eq. 18 does not hold")
    on_second: list[str] = Field(
        description="changed parameters of linear layers in front of an FFN's nonlinearity, W'_{j,2}; Eq. 18 was tested"
    )
    on_third: list[str] = Field(
        description="changed parameters of linear layers behind an FFN's nonlinearity, W'_{j,3}; Eq. 18 was tested"
    )
    through_attention: list[str] = Field(
        description="changed parameters of attention, of which Eq. 18 says nothing: queries and keys act through H, "
        "values and outputs through A (blocks[].operator)"
    )
    elsewhere: list[str] = Field(description="changed parameters that are in no block")
    not_covered: list[Skipped] = Field(
        description="other changed parameters in blocks, and why Eq. 18 was not tested for them"
    )


_CHANCE = Meaning(
    "nats a token",
    "estimate",
    how="for prompts drawn as these; Student's t of the differences, whose sums are exact",
    formula="mean +- t sd / sqrt(prompts)",
    signed=True,
    needs="prompts",
    checked=False,
)


class AnswersSummary(WithReasons):
    """Summary of the changes on what the model itself says in the prompts that are conversations."""

    prompts: int = Field(description="number of prompts that have tokens of the model's own messages")
    tokens: int = Field(description="number of tokens of the model's own messages that are predicted, in all prompts")
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="mean of answer.kl over these prompts")] = Field(
        description="KL(base || tuned) on the model's own messages, mean over the prompts that have some"
    )
    loss_change: Annotated[
        Finite | None,
        Meaning("nats a token", "exact", formula="mean of answer.loss_tuned - answer.loss_base", signed=True),
    ] = Field(
        description="change of the loss on the model's own messages, mean over the prompts that have some; below 0 is "
        "better"
    )
    loss_change_low: Annotated[Finite | None, _CHANCE] = Field(
        description="lower end of the 95 % interval of `loss_change`; null where that is null, of fewer than five "
        "prompts, or the same under all of them"
    )
    loss_change_high: Annotated[Finite | None, _CHANCE] = Field(
        description="upper end of the 95 % interval of `loss_change`, which may be chance where the interval holds 0"
    )


class LoraSummary(WithReasons):
    """The most important numbers on the change, and sentences based on them; of two adapters, on the first."""

    changed: int | None = Field(description="number of parameters that change; of two adapters, by the first")
    frobenius_norm: Annotated[Finite | None, Meaning("norm of dW", "exact", formula="sqrt(sum |dW|_F^2)")] = Field(
        description="Frobenius norm of all changes together"
    )
    relative_frobenius: Annotated[
        Finite | None, Meaning("relative", "exact", formula="sqrt(sum |dW|_F^2 / sum |W|_F^2)")
    ] = Field(description="Frobenius norm of all changes together, relative to that of the base parameters that change")
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="mean of kl over the prompts", needs="prompts")] = (
        Field(default=None, description="KL(base || tuned) of the predictions, mean over the prompts")
    )
    loss_change: Annotated[
        Finite | None,
        Meaning("nats a token", "exact", formula="mean of loss_tuned - loss_base", signed=True, needs="prompts"),
    ] = Field(
        default=None,
        description="change of the loss from base to tuned model, mean over the prompts of more than one token; below "
        "0 is better",
    )
    loss_change_low: Annotated[Finite | None, _CHANCE] = Field(
        default=None,
        description="lower end of the 95 % interval of `loss_change`; null where that is null, of fewer than five "
        "prompts, or the same under all of them",
    )
    loss_change_high: Annotated[Finite | None, _CHANCE] = Field(
        default=None,
        description="upper end of the 95 % interval of `loss_change`, which may be chance where the interval holds 0",
    )
    answers: AnswersSummary | None = Field(
        default=None, description="changes on the model's own messages alone; null where no prompt has such messages"
    )
    notable: list[str] = Field(description="sentences that the numbers support")


class BlockOrigin(Result):
    """Origin of a block, in a tuned checkpoint with another number of blocks than the base."""

    block: str = Field(
        description="name of one block in the tuned checkpoint, which has another number of blocks than the base"
    )
    base: str | None = Field(
        description="name of the base's block that a tuned checkpoint's block was; null where it is like none"
    )
    cosine: Annotated[
        Finite,
        Meaning(
            "cosine",
            "measured",
            how="on the first rows of every matrix; blocks of one model have about 0 with each other",
            formula="mean over matrices of <W, W'> / |W| |W'|",
            signed=True,
        ),
    ] = Field(
        description="mean cosine of a tuned block's matrices to those of the base's block most like it; from 0.5 on it "
        "was that block"
    )


class LoraReport(Report):
    """`duat lora-diff`."""

    command: Annotated[Literal["lora-diff"], COMMAND] = "lora-diff"
    mode: Literal["adapter", "two adapters", "checkpoint"] = Field(description="what was compared with the base")
    level: Literal["lint", "weights", "prompts"] = Field(
        description="how much was computed: the linter's findings alone, changes of the weights, or also what they do "
        "to prompts"
    )
    base: str = Field(description="the base checkpoint, as it was named")
    tuned: str = Field(description="the adapter or the tuned checkpoint, as it was named; of two adapters the first")
    base_quantised: str | None = Field(
        default=None, description="how the base's files hold quantised weights; null where they hold them as they are"
    )
    tuned_quantised: str | None = Field(
        default=None,
        description="how a tuned checkpoint's files hold quantised weights, whose change is then that of the "
        "quantisation as well; null where they hold them as they are",
    )
    method: str = Field(description="the adapter's peft_type in PEFT, of two the first's, or 'full' for a checkpoint")
    dtype: str = Field(description="dtype that most of the base's weights are stored in")
    modules: list[ModuleChange]
    other_modules: list[ModuleChange] | None = Field(
        default=None, description="changes by the second adapter, parameter by parameter"
    )
    kinds: list[KindChange] = Field(
        default=[],
        description="changes by kind of parameter, such as the query projections of all blocks, most changed first",
    )
    other_kinds: list[KindChange] | None = Field(
        default=None, description="changes by the second adapter, by kind of parameter"
    )
    unchanged: list[str] = Field(
        description="parameters that the adapter or checkpoint holds and does not change; in a coarser dtype than the "
        "base's, not beyond rounding to it"
    )
    reshaped: list[str] = Field(
        default=[], description="parameters that are longer or shorter than the base's, and are not compared"
    )
    added: list[str] = Field(description="parameters that the base has not, or has for another number of classes")
    removed: list[str] = Field(description="parameters that only the base has")
    matched: list[BlockOrigin] | None = Field(
        default=None,
        description="origin of each block in a tuned checkpoint with another number of blocks than the base, whose "
        "parameters have that checkpoint's names",
    )
    comparison: Comparison | None = None
    environment: Annotated[Environment | None, _PROMPTS] = Field(
        default=None, description="software, hardware and dtype that both models ran with"
    )
    model: Annotated[ModelFacts | None, _PROMPTS] = Field(
        default=None, description="the base model, as it was loaded to run the prompts"
    )
    prompts: Annotated[list[PromptFacts] | None, _PROMPTS, WHICH] = None
    prompt_set: Annotated[PromptSetFacts | None, _PROMPTS, AS_SET] = None
    blocks: Annotated[list[BlockChange] | None, _PROMPTS] = Field(
        default=None,
        description="changes of each block's W', FFN and output; empty where one of the models has more blocks",
    )
    by_prompt: Annotated[list[PromptChange] | None, _PROMPTS] = Field(
        default=None,
        description=f"changes of output and predictions on each prompt, most moved first; of more than {LISTED:,} "
        "those that moved most",
    )
    certificate: Annotated[Certificate | None, _PROMPTS] = Field(
        default=None, description="how far the base's DUAT form is from the base's own output"
    )
    tuned_certificate: Annotated[Certificate | None, _PROMPTS] = Field(
        default=None, description="how far the tuned model's DUAT form is from the tuned model's own output"
    )
    eq18: Annotated[Eq18 | None, _PROMPTS] = Field(
        default=None,
        description="test of Eq. 18 on the linear layers of the FFNs; null where one of the models has more blocks",
    )
    summary: LoraSummary
    lint: list[LintFinding]
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
