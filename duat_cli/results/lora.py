"""The report of `duat lora-diff`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import (
    COMMAND,
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
_CERTIFICATE = Meaning(
    "relative",
    "measured",
    formula="max over prompts of |x_i - rebuilt_i| / |x_i|",
    source="Eq. 11/12, 33/34",
    over_prompts="largest",
)


def _of_operator(formula: str) -> Meaning:
    return Meaning("relative", "exact", formula=formula, source="Eq. 10, 17")


class LintFinding(Result):
    """One fault of an adapter, or a note on it."""

    rule: str = Field(description="stable id")
    level: Literal["error", "warning", "note"] = Field(description="how severe it is")
    where: str = Field(description="file, module or field")
    message: str = Field(description="what was found, in words")


class OperatorChange(WithReasons):
    """Change of the block's W', relative to |W'_base|_F; its three parts add up, as matrices, to the difference."""

    relative_change: Annotated[Finite | None, _of_operator("|W'_tuned - W'_base|_F / |W'_base|_F")] = Field(
        description="the whole difference"
    )
    routing: Annotated[Finite | None, _of_operator("|sum_h (H'_h S' - H_h S) (x) A_h^T|_F / |W'_base|_F")] = Field(
        description="the part of the difference that lies in what attention looks at, scales of norms included"
    )
    weights: Annotated[Finite | None, _of_operator("|sum_h (H_h S) (x) (A'_h - A_h)^T|_F / |W'_base|_F")] = Field(
        description="the part that lies in what attention carries"
    )
    interaction: Annotated[
        Finite | None, _of_operator("|sum_h (H'_h S' - H_h S) (x) (A'_h - A_h)^T|_F / |W'_base|_F")
    ] = Field(description="the part that only the two together make")


class TermsChange(WithReasons):
    """Relative changes of a block's vectors, tuned less base."""

    ffn: Annotated[Finite | None, Meaning("relative", "exact", formula="|f' - f| / |f|", source="Eq. 11, 18")] = Field(
        description="|f' - f| / |f| of what the FFN adds to the residual stream: behind its own last layer, its bias "
        "included, and behind a norm and a factor of its own, in front of any norm on the stream; the UAT term of the "
        "sum is f without the biases, which the sum counts as static. Of several FFNs in a block, all as one vector"
    )
    dynamic_bias: Annotated[
        Finite | None,
        Meaning("relative", "exact", formula="|dynamic part' - dynamic part| / |pre-activation|", source="Eq. 12, 34"),
    ] = Field(
        description="change of the dynamic part in front of the FFN's nonlinearity, to the base's whole pre-activation"
    )
    output: Annotated[Finite | None, Meaning("relative", "exact", formula="|x' - x| / |x|")] = Field(
        description="|x' - x| / |x| of the block's output"
    )


class BlockChange(Result):
    """One block, means over the prompts."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    operator: OperatorChange
    terms: TermsChange
    base_certificate: Annotated[Finite, _CERTIFICATE] = Field(
        description="relative error of the base's rebuilt output against its own, largest over prompts"
    )
    tuned_certificate: Annotated[Finite, _CERTIFICATE] = Field(description="the same error of the tuned model")


class TokenChange(Result):
    position: int = Field(description="place of the token in the prompt, from 0")
    text: str = Field(description="control characters escaped")
    kl: Annotated[
        Finite, Meaning("nats", "exact", formula="sum_v p_v (ln p_v - ln q_v), p of the base, q of the tuned model")
    ] = Field(description="KL(base || tuned) of what is predicted at it, the next token or a class, nats")


class AnswerChange(WithReasons):
    """Change on what the model itself says in a conversation: only on the tokens of assistant messages' contents, each
    predicted from everything in front of it."""

    tokens: Annotated[int, Meaning("count", "exact")] = Field(description="how many tokens are predicted")
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="mean over these tokens, as of the prompt")] = Field(
        description="mean of KL(base || tuned) where these tokens are predicted, nats; null where it is infinite"
    )
    loss_base: Annotated[
        Finite | None, Meaning("nats", "exact", formula="mean over these tokens of -ln p(the token)")
    ] = Field(description="mean negative log likelihood of these tokens, nats")
    loss_tuned: Annotated[
        Finite | None, Meaning("nats", "exact", formula="mean over these tokens of -ln q(the token)")
    ] = Field(description="the same loss of the tuned model, nats")


class PromptChange(WithReasons):
    """Change of the predictions on one prompt."""

    prompt: int = Field(description="number of the prompt, from 0")
    output: Annotated[Finite, Meaning("relative", "exact", formula="|x_L' - x_L| / |x_L|")] = Field(
        description="|x_L' - x_L| / |x_L| of the last block's output"
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
        description="mean over tokens of KL(base || tuned), nats, without the positions of pictures in a text; of a "
        "classifier of texts, pictures or sounds, the KL of its classes"
    )
    loss_base: Annotated[Finite | None, Meaning("nats", "exact", formula="mean over tokens of -ln p(next token)")] = (
        Field(description="mean negative log likelihood of the prompt's own tokens, nats")
    )
    loss_tuned: Annotated[Finite | None, Meaning("nats", "exact", formula="mean over tokens of -ln q(next token)")] = (
        Field(description="the same loss of the tuned model, nats")
    )
    answer: AnswerChange | None = Field(
        default=None,
        description="of the model's own messages alone; null where the prompt is no conversation that has some",
    )
    moved_tokens: list[TokenChange] = Field(description="the tokens that moved most, at most 5")


class Eq18(WithReasons):
    """Test of Eq. 18, W'_tuned = W'_base + dW, on the linear layers of the FFNs, which it is about.

    On the tuned run's own inputs x, each layer must give y = W_base x + dW x + b, with dW from the adapter's factors or
    from the difference of the files.
    """

    statement: str = Field(description="what is tested, as a formula")
    relative_error: Annotated[
        Finite | None,
        Meaning(
            "relative", "measured", formula="max over layers of |y - (W_base x + dW x + b)| / |y|", source="Eq. 17, 18"
        ),
    ] = Field(description="of the sum, largest over layers; y is what the tuned model made of the layer's input x")
    tolerance: Annotated[Finite, _TOLERANCE] = Field(description="of relative_error")
    change_error: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "measured",
            how="in float64",
            formula="max over layers of |(W_tuned - W_base - dW) x| / |dW x|",
            source="Eq. 17, 18",
        ),
    ] = Field(description="of dW alone, largest over layers")
    change_tolerance: Annotated[Finite, _TOLERANCE] = Field(description="of change_error")
    holds: bool | None = Field(description="both errors of every layer tested are within their tolerances")
    inputs: int = Field(description="input vectors that a layer was tested on, at most")
    failed: list[str] = Field(description="layers of which it does not hold")
    on_second: list[str] = Field(
        description="changed parameters of linear layers in front of an FFN's nonlinearity, W'_{j,2}; tested"
    )
    on_third: list[str] = Field(description="changed parameters of linear layers behind it, W'_{j,3}; tested")
    through_attention: list[str] = Field(
        description="changed parameters of attention, of which Eq. 18 says nothing: queries and keys act through H, "
        "values and outputs through A (blocks[].operator)"
    )
    elsewhere: list[str] = Field(description="changed parameters that are in no block")
    not_covered: list[Skipped] = Field(description="other changed parameters in blocks, and why they were not tested")


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

    prompts: int = Field(description="how many prompts have tokens of it")
    tokens: int = Field(description="how many tokens are predicted in all of them")
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="mean of answer.kl over these prompts")] = Field(
        description="mean over these prompts"
    )
    loss_change: Annotated[
        Finite | None,
        Meaning("nats a token", "exact", formula="mean of answer.loss_tuned - answer.loss_base", signed=True),
    ] = Field(description="mean over these prompts, nats a token; below 0 is better")
    loss_change_low: Annotated[Finite | None, _CHANCE] = Field(
        description="lower end of the 95 % interval of that mean; null of fewer than five such prompts"
    )
    loss_change_high: Annotated[Finite | None, _CHANCE] = Field(
        description="upper end of it; where the interval holds 0 the change may be chance"
    )


class LoraSummary(WithReasons):
    """The most important numbers, and sentences based on them; with two adapters, for the first."""

    changed: int | None = Field(description="parameters that change; of two adapters, by the first")
    frobenius_norm: Annotated[Finite | None, Meaning("norm of dW", "exact", formula="sqrt(sum |dW|_F^2)")] = Field(
        description="of all changes together"
    )
    relative_frobenius: Annotated[
        Finite | None, Meaning("relative", "exact", formula="sqrt(sum |dW|_F^2 / sum |W|_F^2)")
    ] = Field(description="to the base parameters that change, together")
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="mean of kl over the prompts", needs="prompts")] = (
        Field(default=None, description="mean over prompts, with prompts")
    )
    loss_change: Annotated[
        Finite | None,
        Meaning("nats a token", "exact", formula="mean of loss_tuned - loss_base", signed=True, needs="prompts"),
    ] = Field(default=None, description="mean over prompts of loss_tuned - loss_base, nats a token; below 0 is better")
    loss_change_low: Annotated[Finite | None, _CHANCE] = Field(
        default=None, description="lower end of the 95 % interval of that mean; null of fewer than five prompts"
    )
    loss_change_high: Annotated[Finite | None, _CHANCE] = Field(
        default=None, description="upper end of it; where the interval holds 0 the change may be chance"
    )
    answers: AnswersSummary | None = Field(
        default=None, description="the same of the model's own messages alone; null where no prompt has some"
    )
    notable: list[str] = Field(description="sentences that the numbers support")


class BlockOrigin(Result):
    """Origin of a block, in a tuned checkpoint with another number of blocks than the base."""

    block: str = Field(description="its name in the tuned checkpoint")
    base: str | None = Field(description="the base's block that it was; null where it is like none of them")
    cosine: Annotated[
        Finite,
        Meaning(
            "cosine",
            "measured",
            how="on the first rows of every matrix; blocks of one model have about 0 with each other",
            formula="mean over matrices of <W, W'> / |W| |W'|",
            signed=True,
        ),
    ] = Field(description="to the base's block that it is most like; from 0.5 on it was that block")


class LoraReport(Report):
    """`duat lora-diff`."""

    command: Annotated[Literal["lora-diff"], COMMAND] = "lora-diff"
    mode: Literal["adapter", "two adapters", "checkpoint"] = Field(description="what was compared with the base")
    level: Literal["lint", "weights", "prompts"] = Field(description="how much was computed")
    base: str = Field(description="the base checkpoint, as it was named")
    tuned: str = Field(description="the adapter or the tuned checkpoint")
    base_quantised: str | None = Field(
        default=None, description="how the base's files hold quantised weights; null where they hold them as they are"
    )
    tuned_quantised: str | None = Field(
        default=None,
        description="the same of a tuned checkpoint, whose change is then that of the quantisation as well",
    )
    method: str = Field(description="PEFT's peft_type, or 'full'")
    dtype: str = Field(description="of the stored base weights")
    modules: list[ModuleChange]
    other_modules: list[ModuleChange] | None = Field(default=None, description="of the second adapter")
    kinds: list[KindChange] = Field(default=[], description="the same by kind of parameter, most changed first")
    other_kinds: list[KindChange] | None = Field(default=None, description="of the second adapter")
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
        description="of a checkpoint with another number of blocks: which of the base's each of its blocks was; its "
        "parameters have the names of the tuned checkpoint",
    )
    comparison: Comparison | None = None
    environment: Annotated[Environment | None, _PROMPTS] = Field(default=None, description="with prompts")
    model: Annotated[ModelFacts | None, _PROMPTS] = Field(default=None, description="the base, with prompts")
    prompts: Annotated[list[PromptFacts] | None, _PROMPTS, WHICH] = None
    prompt_set: Annotated[PromptSetFacts | None, _PROMPTS, AS_SET] = None
    blocks: Annotated[list[BlockChange] | None, _PROMPTS] = Field(default=None, description="with prompts")
    by_prompt: Annotated[list[PromptChange] | None, _PROMPTS] = Field(
        default=None, description=f"with prompts, most moved first; of more than {LISTED:,} those that moved most"
    )
    certificate: Annotated[Certificate | None, _PROMPTS] = Field(
        default=None, description="of the base model, with prompts"
    )
    tuned_certificate: Annotated[Certificate | None, _PROMPTS] = Field(
        default=None, description="of the tuned model, with prompts"
    )
    eq18: Annotated[Eq18 | None, _PROMPTS] = Field(default=None, description="with prompts")
    summary: LoraSummary
    lint: list[LintFinding]
    skipped: list[Skipped]
    warnings: Warnings
    run: Run
