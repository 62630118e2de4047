"""The report of `duat prune-bound`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from duat_cli.kinds import Kind
from duat_cli.results.base import (
    Certificate,
    Environment,
    Finite,
    ModelFacts,
    PromptFacts,
    Result,
    Run,
    Skipped,
    WithReasons,
)


class Protocol(Result):
    """How the damage was predicted and measured."""

    metric: Literal["hidden", "kl", "nll"]
    unit: str
    meaning: str
    ablate: Literal["zero", "mean"] = Field(description="what stands in for a removed term")
    probes: int = Field(description="K: random directions of the output carried back, for every prompt")
    confidence: Finite
    tokens: int = Field(description="of all prompts together")
    seed: int


class PruneTerm(WithReasons):
    """One term: an additive contribution to the residual stream. Means over the prompts."""

    kind: Kind
    block: int
    index: int | None = Field(description="among the terms of its kind in that block; null for a block")
    module: str = Field(description="the module that holds it")
    place: str | None = Field(
        description="where it meets the residual stream, in front of any norm on the stream: what local and certified "
        "speak of; such as 'input of layers.0.post_attention_layernorm' or 'output of layers.0'"
    )
    local: Finite | None = Field(
        description="|what its removal takes from the stream| / |the stream|, both at the place, over all tokens: "
        "biases of a removed FFN or attention included, a norm on the branch answering, all else held; exact"
    )
    frozen: Finite | None = Field(
        description="|term carried to the last block's output with all dynamic parameters frozen| / |that output|, "
        "exact: one summand of Eq. 16, which bounds by the norm of the sum over a set, to which single norms do not "
        "add up; a direct effect, no bound on the ablation"
    )
    linearised: Finite | None = Field(description="predicted damage of its removal, in the metric's unit; an estimate")
    linearised_low: Finite | None = Field(description="of the probes' sampling alone, at the report's confidence")
    linearised_high: Finite | None
    certified: Finite | None = Field(
        description="most that its removal changes the residual stream at any token, at the place, before later "
        "parts of the block react, for every possible input; euclidean norm, a proved bound"
    )
    certified_relative: Finite | None = Field(
        description="certified / the stream's norm at the place (root mean square over a prompt's tokens, mean over "
        "the prompts)"
    )
    certified_vacuous: bool = Field(description="the bound is no more than what any change there could do")
    measured: Finite | None = Field(description="damage of the real ablation, in the metric's unit")


class NeuronSummary(WithReasons):
    """The neurons of one block."""

    count: int
    median: Finite | None = Field(description="of the predicted damage")
    largest: Finite | None
    negligible_share: Finite | None = Field(
        description="share of neurons that can go one by one: predicted damage below 1 % of the budget"
    )
    certified_largest: Finite | None
    certified_largest_relative: Finite | None = Field(description="largest certified_relative")


class HeadSummary(WithReasons):
    """The heads of one block."""

    count: int
    kv_heads: int = Field(description="heads share a key and value head with count / kv_heads of their neighbours")
    least: Finite | None = Field(description="smallest predicted damage")
    least_index: int | None
    largest: Finite | None
    largest_index: int | None


class PruneBlock(WithReasons):
    """One block: the predicted damage of removing it, or its parts."""

    index: int
    name: str
    block: Finite | None
    attention: Finite | None
    ffn: Finite | None = Field(description="the most damaging, where a block has several")
    block_measured: Finite | None = Field(description="damage of the real ablation; null if it is not in the sample")
    attention_measured: Finite | None
    ffn_measured: Finite | None
    heads: HeadSummary | None
    neurons: NeuronSummary | None
    attention_place: str | None = Field(description="where attention meets the residual stream, as in terms")
    ffn_place: str | None = Field(description="of the FFN with the largest bound, where a block has several")
    certified_attention: Finite | None = Field(description="euclidean norm at one token")
    certified_attention_relative: Finite | None = Field(description="to the stream's norm at the place, as in terms")
    certified_ffn: Finite | None = Field(description="the largest, where a block has several")
    certified_ffn_relative: Finite | None


class Estimated(Result):
    """A value with its interval over the terms (percentile bootstrap)."""

    value: Finite
    low: Finite
    high: Finite


class Prediction(WithReasons):
    """How well the linearised reading orders and sizes the measured damage."""

    granularity: Kind
    metric: Literal["hidden", "kl", "nll"]
    n: int = Field(description="terms ablated for real")
    of: int = Field(description="terms of this kind in the model")
    spearman: Estimated | None
    kendall: Estimated | None
    median_ratio: Estimated | None = Field(description="median of predicted / measured")
    worst_ratio: Estimated | None = Field(description="largest factor between predicted and measured")
    criteria: dict[str, Estimated | None] = Field(
        description="Spearman's rank correlation with the measured damage of criteria in common use"
    )


class CurvePoint(Result):
    """One of the nested sets."""

    removed: int
    share: Finite = Field(description="of the terms of this kind")
    predicted: Finite
    measured: Finite | None


class Guarantee(Result):
    """A statement about prompts that played no part in choosing the set."""

    budget: Finite
    confidence: Finite
    share_above_limit: Finite = Field(
        description="with this confidence, at most this share of prompts (drawn as the held-out ones were) has a "
        "damage above the budget"
    )
    exceeded: int = Field(description="held-out prompts whose damage did exceed it")
    holdout_prompts: int
    holdout_sha256: str = Field(description="of the held-out prompts' own sha256, one a line")
    method: str
    tested: list[int] = Field(
        description="sizes of the sets to be tested, in this order: about a quarter, a half, three quarters and all of "
        "the plan's set"
    )
    removed: int = Field(description="size of the last set that passed; 0 if the first one tested did not")
    share: Finite = Field(description="of the terms of this kind")
    set: list[str] = Field(description="the first of the plan's set, as many as removed")


class Plan(WithReasons):
    """The largest set of one kind within the budget."""

    granularity: Kind
    budget: Finite
    removed: int
    of: int
    share: Finite
    predicted: Finite | None
    measured: Finite | None = Field(description="mean over the prompts; at most the budget")
    curve: list[CurvePoint]
    guarantee: Guarantee | None
    set: list[str] = Field(
        description="kind, block and index of its terms as block.3.head.1 (block.3 for a block), in the order of "
        "removal: a smaller set of the curve is the beginning of this one"
    )


class PruneReport(Result):
    """`duat prune-bound`."""

    schema_version: Literal["2"] = "2"
    command: Literal["prune-bound"] = "prune-bound"
    duat_version: str
    environment: Environment
    model: ModelFacts
    prompts: list[PromptFacts]
    certificate: Certificate = Field(description="of the replay that local and frozen are read from")
    protocol: Protocol
    blocks: list[PruneBlock]
    prediction: list[Prediction]
    plans: list[Plan]
    terms: list[PruneTerm]
    skipped: list[Skipped]
    warnings: list[str]
    run: Run
