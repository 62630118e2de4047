"""Terms and their damage in the report of `duat prune-bound`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from duat_cli.kinds import Kind
from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.meaning import Meaning

Metric = Annotated[
    Literal["hidden", "kl", "nll"],
    Field(
        description="metric of the damage: kl (divergence of the predicted distribution, nats), hidden (relative "
        "change of the final hidden states) or nll (change of the next-token loss, nats a token)"
    ),
]
_BOOTSTRAP = (
    "with a percentile bootstrap interval over the terms (Efron 1979), each weighing 1 / its chance to be drawn"
)
_OVER_TERMS = (
    "with an interval over the terms: of a mean by Student's t or the studentised bootstrap, of all else a percentile "
    "bootstrap (Efron 1979)"
)
_LINEARISED = Meaning("the metric's", "estimate", how="linearised", signed=True)  # the damage in nll may be a gain
_LINEARISED_END = Meaning("the metric's", "estimate", how="end of an interval", signed=True)
ABLATED = Meaning("the metric's", "measured", signed=True)
_CERTIFIED = Meaning("euclidean norm at one token", "bound", how="proved")
_CERTIFIED_RELATIVE = Meaning("times the stream's norm", "bound", how="divided by a measurement")
_INTERVAL_END = Meaning("the statistic's", "estimate", how="end of an interval", signed=True)
_RANKED = Meaning("-1 to 1", "estimate", how=_BOOTSTRAP, signed=True)
_RATIO = Meaning("factor", "estimate", how=_BOOTSTRAP)
COUNT = Meaning("terms", "exact")
CONFIDENCE = Meaning("probability", "given", formula="--confidence")


NEGLIGIBLE = 0.01  # largest damage of a neuron that counts as removable, as a share of the budget


class Protocol(WithReasons):
    """How the damage was predicted and measured."""

    metric: Metric
    unit: str = Field(description="unit of the damage")
    meaning: str = Field(
        description="the metric in words, as a mean over prompts; a guarantee counts the damage of each prompt by "
        "itself, without that mean"
    )
    ablate: Literal["zero", "mean"] = Field(
        description="what stands in for a removed term: nothing (zero), or the mean of its activations (mean)"
    )
    probes: int = Field(
        description="number K of random directions of the output that are carried back, for every prompt"
    )
    confidence: Annotated[Finite, CONFIDENCE] = Field(description="probability with which an interval holds")
    tokens: int = Field(description="number of tokens of all prompts together")
    seed: int = Field(description="seed of the random directions")
    loss: Annotated[Finite | None, Meaning("nats a token", "measured")] = Field(
        description="next-token loss of the model as it is, mean over the prompts; of pictures within a text, over its "
        "words"
    )
    uniform_loss: Annotated[Finite | None, Meaning("nats a token", "exact", formula="log of the vocabulary's size")] = (
        Field(description="loss of a model that finds every token equally likely")
    )


class PruneTerm(WithReasons):
    """One term, an additive contribution to the residual stream that can be removed; its readings are means over
    the prompts."""

    kind: Kind = Field(description="kind of the term: neuron, head, expert, ffn, attention or block")
    block: int = Field(description="number of the block, from 0")
    index: int | None = Field(
        description="number of the term among those of its kind in its block, from 0; null for a block"
    )
    module: str = Field(description="name of the module that holds the term")
    place: str | None = Field(
        description="where the term meets the residual stream, in front of any norm on the stream, such as 'input of "
        "layers.0.post_attention_layernorm' or 'output of layers.0': what `local` and `certified` speak of"
    )
    local: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "exact",
            how="all else is held",
            formula="|what its removal takes from the stream| / |the stream| at the place",
            source="of a neuron a term of Eq. 13-16, before anything behind it; of larger parts the same",
        ),
    ] = Field(
        description="norm of what the term's removal takes from the residual stream at `place`, relative to the stream "
        "there, over all tokens: biases of a removed FFN or attention included, a norm on the branch answering, all "
        "else held"
    )
    frozen: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "exact",
            how="dynamic parameters are held, so it is no bound on the ablation",
            formula="|T_L ... T_{j+1} term| / |x_L|",
            source="of a neuron one summand of Eq. 16; of larger parts the same",
        ),
    ] = Field(
        description="norm of the term carried to the last block's output with all dynamic parameters frozen, relative "
        "to that output: a direct effect, no bound on the ablation. Norms of several terms must not be added: Eq. 16 "
        "takes the norm of their sum"
    )
    linearised: Annotated[
        Finite | None,
        Meaning(
            "the metric's: nats a token, or relative",
            "estimate",
            how="with an interval, which is of the sampling, not of the linearisation; terms share the probes, so that "
            "intervals of many may miss at once",
            formula="from responses r_k = <d<v_k, out>/d site, term> of K probes v_k: the leading term of the damage",
            signed=True,
            source="Gaussian probes with the covariance of the metric; intervals by chi-square, Satterthwaite (1946)",
        ),
    ] = Field(description="predicted damage of the term's removal")
    linearised_low: Annotated[Finite | None, _LINEARISED_END] = Field(
        description="lower end of the interval of `linearised` for the sampling of probes alone, at the report's "
        "confidence"
    )
    linearised_high: Annotated[Finite | None, _LINEARISED_END] = Field(
        description="upper end of the interval of `linearised` for the sampling of probes alone, at the report's "
        "confidence"
    )
    certified: Annotated[
        Finite | None,
        replace(
            _CERTIFIED,
            formula="at least the maximum, over every input, of |the term's addition to the stream| at one token",
            source="the ball that the norm in front leaves, and the weights behind it",
        ),
    ] = Field(
        description="largest change of the residual stream that removing the term can cause at any token, at `place`, "
        "before later parts of the block react, for every possible input"
    )
    certified_relative: Annotated[
        Finite | None,
        replace(_CERTIFIED_RELATIVE, formula="certified / root mean square over tokens of |stream| at the place"),
    ] = Field(
        description="`certified` as a multiple of the residual stream's norm at `place` (root mean square over a "
        "prompt's tokens, mean over the prompts)"
    )
    certified_vacuous: bool = Field(
        description="whether `certified` says nothing of the term itself, as no more than what any change in front of "
        "the branch's norm could do"
    )
    measured: Annotated[
        Finite | None,
        Meaning(
            "the metric's: nats a token, or relative",
            "measured",
            formula="damage with the term really removed",
            signed=True,
        ),
    ] = Field(
        description="damage of the term's real ablation; null where the term is not in the sample that was ablated"
    )


class NeuronSummary(WithReasons):
    """Damage and certified bounds of the neurons of one block."""

    count: int = Field(description="number of neurons in the block")
    median: Annotated[Finite | None, _LINEARISED] = Field(
        description="median of the predicted damage of the block's neurons, each removed alone"
    )
    largest: Annotated[Finite | None, _LINEARISED] = Field(
        description="largest predicted damage of one of the block's neurons"
    )
    negligible_share: Annotated[
        Finite | None,
        Meaning(
            "share, 0 to 1",
            "estimate",
            how="linearised; of |measured| where every neuron of the block was ablated, and then exact",
            formula="share with |linearised| < 0.01 budget",
        ),
    ] = Field(
        description="share of the block's neurons that can go one by one: damage below 1 % of the budget, predicted "
        "unless all of them were ablated"
    )
    certified_largest: Annotated[Finite | None, _CERTIFIED] = Field(
        description="largest `certified` bound of one of the block's neurons"
    )
    certified_largest_relative: Annotated[Finite | None, _CERTIFIED_RELATIVE] = Field(
        description="largest `certified_relative` of one of the block's neurons"
    )


class HeadSummary(WithReasons):
    """Predicted damage of the heads of one block."""

    count: int = Field(description="number of heads in the block")
    kv_heads: int = Field(
        description="number of key and value heads, each of which `count` / `kv_heads` neighbouring heads share; in a "
        "mixer without softmax no heads do, and it equals `count`"
    )
    least: Annotated[Finite | None, _LINEARISED] = Field(
        description="smallest predicted damage of one of the block's heads"
    )
    least_index: int | None = Field(
        description="number of the block's head that has the smallest predicted damage, from 0"
    )
    largest: Annotated[Finite | None, _LINEARISED] = Field(
        description="largest predicted damage of one of the block's heads"
    )
    largest_index: int | None = Field(
        description="number of the block's head that has the largest predicted damage, from 0"
    )


class PruneBlock(WithReasons):
    """Predicted and measured damage of removing one block, or its parts, and their certified bounds."""

    index: int = Field(description="number of the block, from 0")
    name: str = Field(description="the block's module name")
    block: Annotated[Finite | None, _LINEARISED] = Field(description="predicted damage of removing the block")
    attention: Annotated[Finite | None, _LINEARISED] = Field(
        description="predicted damage of removing the block's attention; the largest where the block has several"
    )
    cross: Annotated[Finite | None, _LINEARISED] = Field(
        None, description="predicted damage of removing the cross-attention of a decoder's block"
    )
    ffn: Annotated[Finite | None, _LINEARISED] = Field(
        description="predicted damage of removing the block's FFN; the largest where the block has several"
    )
    block_measured: Annotated[Finite | None, ABLATED] = Field(
        description="damage of really removing the block; null where it was not ablated"
    )
    attention_measured: Annotated[Finite | None, ABLATED] = Field(
        description="damage of really removing the block's attention, the largest where the block has several; null "
        "where one of them was not ablated"
    )
    cross_measured: Annotated[Finite | None, ABLATED] = Field(
        None,
        description="damage of really removing the cross-attention of a decoder's block; null where it was not ablated",
    )
    ffn_measured: Annotated[Finite | None, ABLATED] = Field(
        description="damage of really removing the block's FFN, the largest where the block has several; null where "
        "one of them was not ablated"
    )
    heads: HeadSummary | None
    neurons: NeuronSummary | None
    attention_place: str | None = Field(
        description="where the block's attention meets the residual stream; of several, where the one with the largest "
        "bound does"
    )
    ffn_place: str | None = Field(
        description="where the block's FFN meets the residual stream; of several, where the one with the largest bound "
        "does"
    )
    certified_attention: Annotated[Finite | None, _CERTIFIED] = Field(
        description="largest change of the residual stream that removing the block's attention can cause at any token, "
        "at `attention_place`, for every possible input; the largest where the block has several"
    )
    certified_attention_relative: Annotated[Finite | None, _CERTIFIED_RELATIVE] = Field(
        description="`certified_attention` as a multiple of the residual stream's norm at `attention_place`"
    )
    certified_ffn: Annotated[Finite | None, _CERTIFIED] = Field(
        description="largest change of the residual stream that removing the block's FFN can cause at any token, at "
        "`ffn_place`, for every possible input; the largest where the block has several"
    )
    certified_ffn_relative: Annotated[Finite | None, _CERTIFIED_RELATIVE] = Field(
        description="`certified_ffn` as a multiple of the residual stream's norm at `ffn_place`"
    )


class Estimated(Result):
    """A value with its interval over the terms: a percentile bootstrap or, for a mean, the interval from sampling."""

    value: Annotated[Finite, Meaning("the statistic's", "estimate", how=_OVER_TERMS, signed=True)] = Field(
        description="estimate, over all terms of one kind, of a statistic such as a rank correlation or a mean"
    )
    low: Annotated[Finite, _INTERVAL_END] = Field(
        description="lower end of the interval of a statistic estimated over the terms of one kind"
    )
    high: Annotated[Finite, _INTERVAL_END] = Field(
        description="upper end of the interval of a statistic estimated over the terms of one kind"
    )


class Prediction(WithReasons):
    """How well the predicted damage of the terms of one kind orders and sizes the measured damage."""

    granularity: Kind = Field(description="the kind of terms: neuron, head, expert, ffn, attention or block")
    metric: Metric
    n: Annotated[int, COUNT] = Field(description="number of terms of this kind that were ablated for real, each alone")
    of: Annotated[int, COUNT] = Field(
        description="number of terms of this kind, or of these kinds together, in the model"
    )
    mean_predicted: Annotated[Finite, _LINEARISED] = Field(
        description="predicted damage of removing one term, mean over all terms of this kind"
    )
    mean_measured: Annotated[
        Estimated | None,
        Meaning(
            "the metric's",
            "estimate",
            how="the interval is of which terms are drawn, not of which prompts, and holds less often than said where "
            "few terms that are predicted to be small hold most of the error; exact where all are ablated",
            formula="(s sum of all predictions + sum over ablated terms of (measured - s predicted) / chance) / terms, "
            "s from 0 to 1, fitted to the ablated terms",
            source="regression estimator, Särndal, Swensson & Wretman (1992); variance by Hájek (1964); ends of the "
            "interval by Student's t or the studentised bootstrap, whichever is further out",
            signed=True,
        ),
    ] = Field(
        description="damage of really removing one term, mean over all terms of this kind, estimated from those that "
        "were ablated, which are drawn with chances that grow with the prediction, with the prediction as control "
        "variate"
    )
    spearman: Annotated[
        Estimated | None, replace(_RANKED, formula="correlation of the ranks of linearised and measured")
    ] = Field(
        description="Spearman's rank correlation between predicted and measured damage of the terms of this kind; null "
        "where too few were ablated, or one side is constant"
    )
    kendall: Annotated[Estimated | None, replace(_RANKED, formula="tau-b of linearised and measured")] = Field(
        description="Kendall's rank correlation (tau-b) between predicted and measured damage of the terms of this "
        "kind; null where too few were ablated, or one side is constant"
    )
    median_ratio: Annotated[
        Estimated | None, replace(_RATIO, formula="median of linearised / measured, where both are above 0")
    ] = Field(description="median of predicted / measured damage over the terms of this kind where both are above 0")
    worst_ratio: Annotated[
        Finite | None,
        Meaning(
            "factor",
            "measured",
            how="of the terms that were ablated: others may be further off; null where one of the two is 0 or they "
            "differ in sign, since no factor is then finite; both 0, to the rounding of the dtype, is no difference",
            formula="the ratio linearised / measured that is farthest from 1, as a factor of at least 1",
        ),
    ] = Field(description="largest factor between predicted and measured damage of one ablated term")
    valid_to: Annotated[
        Finite | None,
        Meaning(
            "the metric's",
            "measured",
            how="of the terms that were ablated; both 0, to the rounding of the dtype, is within it, one of them 0 is "
            "not",
            formula="largest p above 0 such that every ablated term with linearised <= p has "
            "1/2 <= linearised / measured <= 2",
        ),
    ] = Field(
        description="largest predicted damage up to which the prediction of every ablated term is within a factor of 2 "
        "of its measured damage"
    )
    criteria: Annotated[
        dict[str, Estimated | None],
        replace(
            _RANKED,
            source="magnitude; activation x norm; wanda (Sun et al. 2023); taylor (Molchanov et al. 2019); shortgpt "
            "(Men et al. 2024); angular (Gromov et al. 2024)",
        ),
    ] = Field(
        description="Spearman's rank correlation of each criterion in common use with the measured damage of the terms "
        "of this kind; criteria without a score for one of the ablated terms are left out"
    )
