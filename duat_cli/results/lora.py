"""The report of `duat lora-diff`."""

from __future__ import annotations

from typing import Annotated, Literal

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
    Skipped,
    WithReasons,
)
from duat_cli.results.meaning import Meaning

_CHANGE = Meaning("relative", "exact")


class Alignment(Result):
    """How much of the change lies in the base weight's leading directions: |U_base^T U_change|_F^2 / min(k, j)."""

    k: int = Field(description="leading singular directions of the base weight")
    j: int = Field(description="leading singular directions of the change")
    output: Share = Field(description="on the output side")
    output_random: Share = Field(description="what a random subspace would give")
    input: Share = Field(description="on the input side")
    input_random: Share


class Intruders(WithReasons):
    """Leading singular vectors of the tuned weight that resemble no singular vector of the base weight."""

    k: int = Field(description="leading singular vectors of the tuned weight that are looked at")
    epsilon: Finite = Field(description="an intruder's |cosine| with every singular vector of the base is below it")
    output: int | None = Field(description="intruders among the k on the output side")
    input: int | None = Field(description="intruders among the k on the input side")


class Rounding(WithReasons):
    """What rounding can do to the singular values of a difference of two stored weights."""

    dtype: str = Field(description="of the tuned weight as it is stored")
    floor: Finite = Field(
        description="spectral norm that rounding alone may give: of both weights to their stored dtypes, of the change "
        "(a product computed in the tuned weight's dtype, with sums in float32) before it was added, and the error of "
        "the singular values found here; an upper estimate that takes rounding errors as independent"
    )
    rank_above_floor: int | None = Field(description="singular values above the floor: what rounding did not make")


class ModuleChange(WithReasons):
    """What one parameter of the base model changes by; of a stack of experts, as a block-diagonal matrix."""

    name: str = Field(description="the base model's module")
    parameter: str = Field(description="of that module, such as weight or bias")
    kind: str = Field(description="lora, dora, embedding lora, expert lora, adalora, ia3, loha, lokr, saved, full, ...")
    shape: list[int] = Field(description="of the parameter as the base stores it")
    rank: int | None = Field(description="as the adapter states it, for each expert")
    scaling: Finite | None = Field(description="what multiplies B A")
    relative_to: str = Field(
        description="'base', or the initialisation whose own B A was taken out of the base that it was trained on"
    )
    frobenius_norm: Finite | None
    relative_frobenius: Finite | None = Field(description="to the base parameter's norm")
    spectral_norm: Finite | None
    numerical_rank: int | None = Field(
        description="singular values above max(shape) eps sigma_1; eps of float64 "
        "where the change is known by its factors, else of float32"
    )
    stable_rank: Finite | None = Field(description="sum of sigma^2 / sigma_1^2")
    entropy_rank: Finite | None = Field(description="exp of the entropy of sigma^2 / sum of sigma^2")
    energy_rank_90: int | None = Field(description="fewest directions that hold 90 % of sum of sigma^2")
    singular_values: list[Finite] | None = Field(description="the leading ones, at most 16")
    alignment: Alignment | None = Field(description="with the base's leading subspaces")
    intruders: Intruders | None
    sup_local: Finite | None = Field(
        description="largest norm that the change can add to the module's output, for every possible input behind "
        "the norm in front: sqrt(M) sigma_max(dW diag(gain))"
    )
    rounding: Rounding | None = Field(default=None, description="for a full checkpoint: what rounding may have made")
    added_rows: int = Field(
        default=0, description="rows that the base has not (a resized vocabulary); not in the norms"
    )


class ModuleComparison(WithReasons):
    """The two adapters' changes of one parameter; gauge, rank and the split of the scale do not matter."""

    name: str
    parameter: str
    cosine: Finite | None = Field(description="<dW1, dW2> / (|dW1| |dW2|)")
    distance: Finite = Field(description="|dW1 - dW2|_F")
    relative_distance: Finite | None = Field(description="distance / (|dW1| + |dW2|), 0 to 1")
    output_cosines: list[Finite] | None = Field(description="of the principal angles between the output subspaces")
    input_cosines: list[Finite] | None


class Comparison(WithReasons):
    """Two adapters of one base."""

    other: str = Field(description="the second adapter")
    modules: list[ModuleComparison] = Field(description="changed by both")
    only_first: list[str]
    only_second: list[str]
    cosine: Finite | None = Field(description="of all changes as one vector")
    agreeing: list[str] = Field(description="parameters with a cosine above 0.5")
    opposing: list[str] = Field(description="parameters with a cosine below -0.5")


class LintFinding(Result):
    """One thing that goes wrong in practice."""

    rule: str = Field(description="stable id")
    level: Literal["error", "warning", "note"]
    where: str = Field(description="file, module or field")
    message: str


class OperatorChange(WithReasons):
    """What the block's W' changed by, in parts of |W'_base|_F; the three parts add up to the difference."""

    relative_change: Annotated[Finite | None, _CHANGE] = Field(description="|W'_tuned - W'_base|_F / |W'_base|_F")
    routing: Annotated[Finite | None, _CHANGE] = Field(
        description="|sum (H'-H) (x) A| / |W'_base|: what attention looks at"
    )
    weights: Annotated[Finite | None, _CHANGE] = Field(description="|sum H (x) (A'-A)| / |W'_base|: what it carries")
    interaction: Annotated[Finite | None, _CHANGE] = Field(description="|sum (H'-H) (x) (A'-A)| / |W'_base|")


class TermsChange(WithReasons):
    """Relative changes of a block's vectors, tuned less base."""

    ffn: Annotated[Finite | None, _CHANGE] = Field(
        description="|f' - f| / |f| of what the FFN adds to the residual stream: behind its own last layer, its bias "
        "included, and behind a norm and a factor of its own, in front of any norm on the stream; the UAT term of the "
        "sum is f without the biases, which the sum counts as static. Of several FFNs in a block, all as one vector"
    )
    dynamic_bias: Annotated[Finite | None, _CHANGE] = Field(
        description="change of the dynamic part in front of the FFN's nonlinearity, to the base's whole pre-activation"
    )
    output: Annotated[Finite | None, _CHANGE] = Field(description="|x' - x| / |x| of the block's output")


class BlockChange(Result):
    """One block, means over the prompts."""

    index: int
    name: str
    operator: OperatorChange
    terms: TermsChange
    base_certificate: Finite = Field(description="largest over prompts of |x - rebuilt| / |x|, of the base")
    tuned_certificate: Finite


class TokenChange(Result):
    position: int
    text: str = Field(description="control characters escaped")
    kl: Finite = Field(description="KL(base || tuned) of the next-token distribution behind it, nats")


class PromptChange(WithReasons):
    """One prompt."""

    prompt: int
    output: Finite = Field(description="|x_L' - x_L| / |x_L| of the last block's output")
    kl: Finite | None = Field(description="mean over tokens of KL(base || tuned), nats")
    loss_base: Finite | None = Field(description="mean negative log likelihood of the prompt's own tokens, nats")
    loss_tuned: Finite | None
    moved_tokens: list[TokenChange] = Field(description="the tokens that moved most, at most 5")


class Eq18(WithReasons):
    """Eq. 18, tested where it speaks, the linear layers of the FFNs: W'_tuned = W'_base + dW.

    On the tuned run's own inputs x each layer must give y = W_base x + dW x + b, with dW from the adapter's factors or
    from the difference of the files.
    """

    statement: str
    relative_error: Finite | None = Field(
        description="of the sum, largest over layers: |y - (W_base x + dW x + b)| / |y|, y as the tuned model made it"
    )
    tolerance: Finite = Field(description="of relative_error")
    change_error: Finite | None = Field(
        description="of dW alone, largest over layers: |(W_tuned - W_base - dW) x| / |dW x|, in float64"
    )
    change_tolerance: Finite = Field(description="of change_error")
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


class LoraSummary(WithReasons):
    changed: int = Field(description="parameters that change")
    frobenius_norm: Finite | None = Field(description="of all changes together")
    relative_frobenius: Finite | None = Field(description="to the base parameters that change, together")
    kl: Finite | None = Field(default=None, description="mean over prompts, with prompts")
    loss_change: Finite | None = Field(
        default=None, description="mean over prompts of loss_tuned - loss_base, nats a token; below 0 is better"
    )
    notable: list[str]


class LoraReport(Result):
    """`duat lora-diff`."""

    schema_version: Literal["2"] = "2"
    command: Literal["lora-diff"] = "lora-diff"
    duat_version: str
    mode: Literal["adapter", "two adapters", "checkpoint"]
    level: Literal["lint", "weights", "prompts"] = Field(description="how much was computed")
    base: str
    tuned: str = Field(description="the adapter or the tuned checkpoint")
    method: str = Field(description="PEFT's peft_type, or 'full'")
    dtype: str = Field(description="of the stored base weights")
    modules: list[ModuleChange]
    other_modules: list[ModuleChange] | None = Field(default=None, description="of the second adapter")
    unchanged: list[str] = Field(description="parameters that the adapter or checkpoint holds and does not change")
    added: list[str] = Field(description="parameters that the base has not")
    removed: list[str] = Field(description="parameters that only the base has")
    comparison: Comparison | None = None
    environment: Environment | None = Field(default=None, description="with prompts")
    model: ModelFacts | None = Field(default=None, description="the base, with prompts")
    prompts: list[PromptFacts] | None = None
    blocks: list[BlockChange] | None = Field(default=None, description="with prompts")
    by_prompt: list[PromptChange] | None = Field(default=None, description="with prompts, most moved first")
    certificate: Certificate | None = Field(default=None, description="of the base model, with prompts")
    tuned_certificate: Certificate | None = Field(default=None, description="of the tuned model, with prompts")
    eq18: Eq18 | None = Field(default=None, description="with prompts")
    summary: LoraSummary
    lint: list[LintFinding]
    skipped: list[Skipped]
    warnings: list[str]
    run: Run
