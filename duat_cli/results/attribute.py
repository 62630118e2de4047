"""The report of `duat attribute`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import COMMAND, Finite, ModelReport, PromptFacts, Result, Run, Skipped, Warnings, WithReasons
from duat_cli.results.meaning import Meaning

_TOTAL = Meaning(
    "logits",
    "exact",
    formula="<gradient through all later frozen blocks, part>",
    source="Eq. 11/12, 33/34",
    signed=True,
)
_DIRECT = Meaning("logits", "exact", formula="<gradient along the residual stream alone, part>", signed=True)
_LOGIT = Meaning("logits", "measured", signed=True)
_PROBABILITY = Meaning("0 to 1", "measured", formula="softmax of the untouched model's logits")
_RESIDUAL = Meaning(
    "relative", "measured", formula="|sum of parts - logit| / largest absolute partial sum", better="lower"
)
_LOST = Meaning("logits", "measured", formula="logit - logit without it", signed=True)
_KL = Meaning("nats", "measured", formula="KL(softmax of the model's logits || softmax of those without it)")


class TokenPart(Result):
    """Part of one token of the prompt, through its vector at the first block's input: embedding and position."""

    position: int = Field(description="position of the token in the input, from 0")
    id: int | None = Field(
        default=None,
        description="id of the token in the vocabulary; null for a vector that blocks read in the place of tokens, "
        "and for an encoder's state that stands for none",
    )
    text: str = Field(description="text of the token, control characters escaped")
    value: Annotated[Finite, _TOTAL] = Field(
        description="part of the logit from the token's vector at the first block, or encoder state, through all blocks"
    )
    direct: Annotated[Finite, _DIRECT] = Field(description="part that the token's vector writes straight to the logit")


class StaticPart(Result):
    """Part of the logit from biases, at the output of each block; those of an FFN's last layer are included."""

    value: Annotated[Finite, _TOTAL] = Field(description="part of the logit from the biases of all blocks")
    blocks: Annotated[list[Finite], _TOTAL] = Field(description="part of the logit from each block's biases")


class UnitPart(WithReasons):
    """UAT term of each call of a nonlinear unit, such as a block's FFN, without its output bias."""

    block: int = Field(description="number of the block, from 0")
    unit: int = Field(description="number of the unit's call among the block's, from 0")
    name: str = Field(description="class of the unit; two, where one scales the other and only both together add")
    mixes: bool = Field(description="whether the unit mixes tokens, and so is no FFN")
    value: Annotated[Finite, _TOTAL] = Field(description="part of the logit from a unit's call, through later blocks")
    tokens: Annotated[list[Finite] | None, _TOTAL] = Field(
        description="part of the logit that the unit computes at each token; null where its output has no row a token"
    )


class InnerPart(Result):
    """Part of one neuron or expert, which is included in the value of its unit."""

    block: int = Field(description="number of the block, from 0")
    unit: int = Field(description="number of the unit's call among the block's, from 0")
    expert: int | None = Field(description="number of the expert that holds the neuron, from 0; null where none does")
    index: int = Field(description="number of the neuron or expert in its unit, or of the neuron in its expert, from 0")
    value: Annotated[Finite, _TOTAL] = Field(
        description="part of the logit from a neuron or expert, through all later blocks; included in its unit's "
        "`value`"
    )
    direct: Annotated[Finite, _DIRECT] = Field(description="part that a neuron or expert writes straight to the logit")


class EncoderPart(Result):
    """Part of the encoder's states through cross-attention, its weights H held; its biases count as static."""

    value: Annotated[Finite, _TOTAL] = Field(description="part of the logit from all encoder states, over all blocks")
    direct: Annotated[Finite, _DIRECT] = Field(description="part that the encoder's states write straight to the logit")
    blocks: Annotated[list[Finite], _TOTAL] = Field(
        description="part of the logit from the encoder's states through each block's cross-attention"
    )
    tokens: list[TokenPart] = Field(description="parts of the encoder's states, with the tokens that they stand for")


class PicturePart(Result):
    """Sum of the parts at the positions that pictures, videos and sounds take in the text: of their `tokens`, and of
    units there. These parts are already counted in `tokens` and units."""

    positions: int = Field(description="number of positions that hold pieces of pictures, videos and sounds")
    value: Annotated[Finite, _TOTAL] = Field(
        description="part of the logit from the vectors that the model's vision or sound part puts into the text"
    )
    direct: Annotated[Finite, _DIRECT] = Field(
        description="part that pieces of pictures, videos and sounds write straight to the logit"
    )
    computed: Annotated[Finite, _TOTAL] = Field(
        description="part of the logit from the UAT terms of all blocks at the pieces of pictures, videos and sounds"
    )


class Parts(Result):
    """The total reading: each part through all later blocks, which are frozen. The parts add up to the logit."""

    tokens: list[TokenPart]
    static: StaticPart
    units: list[UnitPart]
    head_bias: Annotated[Finite, _TOTAL] = Field(
        description="part of the logit that the way from the last block to the output gives for zeros: biases of its "
        "norm and layers"
    )
    neurons: list[InnerPart] = Field(
        description="the leading neurons of all units, by absolute value; those of an expert add up to its part, but "
        "for its output bias"
    )
    experts: list[InnerPart] = Field(description="the leading experts of all units, by absolute value")
    encoder: EncoderPart | None = Field(
        default=None, description="part of the encoder's states, in a decoder (--stack decoder); null in other stacks"
    )
    picture: PicturePart | None = Field(
        default=None,
        description="part of pictures, videos and sounds within the text (--image, --inputs); null for words alone",
    )


class HeadPart(Result):
    """Part of each attention head: what it writes straight to the logit, and what passes through it."""

    block: int = Field(description="number of the block, from 0")
    head: int = Field(description="number of the head, from 0")
    value: Annotated[Finite, _DIRECT] = Field(description="part that the head writes straight to the logit")
    moved: Annotated[Finite, _TOTAL] = Field(
        description="part of the logit that passes through the head, from token to token and through all later "
        "blocks. The parts of tokens, biases and units hold it already: not to be added to them"
    )


class DirectUnit(Result):
    """Part that each unit's call, such as a block's FFN, writes straight to the logit."""

    block: int = Field(description="number of the block, from 0")
    unit: int = Field(description="number of the unit's call among the block's, from 0")
    value: Annotated[Finite, _DIRECT] = Field(description="part that the unit's call writes straight to the logit")


class Direct(Result):
    """The direct reading: the part that each component writes straight to the logit, past all later blocks' attention
    and units, through the frozen norms on the residual stream. The parts add up to the logit, in a decoder with
    `parts.encoder.direct`."""

    tokens: Annotated[Finite, _DIRECT] = Field(description="part that all tokens' vectors write straight to the logit")
    static: Annotated[Finite, _DIRECT] = Field(
        description="part that biases write straight to the logit; those of attention's values count in its heads"
    )
    heads: list[HeadPart]
    units: list[DirectUnit]
    head_bias: Annotated[Finite, _DIRECT] = Field(description="part of the logit from the biases behind the last block")
    neurons: list[InnerPart] = Field(description="leading neurons, by the part that they write straight to the logit")
    experts: list[InnerPart] = Field(description="leading experts, by the part that they write straight to the logit")
    residual: Annotated[Finite, _RESIDUAL] = Field(description="distance of the parts' sum from the model's own logit")


class Move(Result):
    """Part that a head moved from one token to another."""

    source: int = Field(description="position of the token that the head reads, from 0")
    target: int = Field(description="position of the token that the head writes to, from 0")
    value: Annotated[Finite, _TOTAL] = Field(description="part of the head's `moved` that goes from source to target")
    attention: Annotated[Finite, Meaning("entry of H", "exact", signed=True)] = Field(
        description="attention weight H_h[target, source] of the head"
    )
    carried: Annotated[Finite, _TOTAL] = Field(
        description="part that the source would add with an attention weight of 1"
    )


class Flow(Result):
    """Largest moves from token to token of each leading head."""

    block: int = Field(description="number of the block, from 0")
    head: int = Field(description="number of the head, from 0")
    moved: Annotated[Finite, _TOTAL] = Field(description="part of the logit that passes through the head")
    moves: list[Move] = Field(description="largest moves of the head, by absolute value, at most 10")


class TokenName(Result):
    """A token of the vocabulary, a class of a classifier, or a component of a vector."""

    id: int = Field(description="place of the token, class or component in the output, from 0")
    text: str = Field(description="text of the token, class or component, control characters escaped")


class TargetFacts(WithReasons):
    """The target of an attribution, such as a token, a class or a norm."""

    kind: Literal["token", "class", "component", "norm", "log-probability"] = Field(
        description="what is attributed: a token of the vocabulary; its log-probability, linearised; a class; or, of "
        "a model without a head, a component or the norm of the mean of its last hidden states, the norm along the "
        "vector's own direction"
    )
    token: TokenName | None = Field(description="token, class or component that is attributed; null for a norm")
    given: bool = Field(
        description="whether option, text or continuation set the target; otherwise it is the model's own first choice"
    )
    against: TokenName | None = Field(description="token or class whose logit is subtracted; null where none is")
    against_mean: bool = Field(description="whether the mean logit of all tokens or classes is subtracted")


class RemovedPart(WithReasons):
    """Head or neuron, its frozen part, and what the model does without it."""

    block: int = Field(description="number of the block, from 0")
    unit: int | None = Field(description="number of the unit's call among the block's, from 0; null for a head")
    expert: int | None = Field(description="number of the expert that holds the neuron, from 0; null where none does")
    index: int = Field(description="number of the head in its block, or of the neuron in its unit or expert, from 0")
    part: Annotated[Finite, _TOTAL] = Field(description="frozen part of the head (`moved`) or neuron")
    direct: Annotated[Finite | None, _DIRECT] = Field(
        description="part that the head writes straight to the logit; null for a neuron"
    )
    change: Annotated[Finite | None, _LOST] = Field(
        description="how much of the logit is lost when the head or neuron is set to zero; of a norm: of the length "
        "itself, while its part is along the direction that the vector had"
    )
    kl: Annotated[Finite | None, _KL] = Field(
        description="divergence of the target's output distribution when the head or neuron is set to zero"
    )


class RemovedToken(WithReasons):
    """A token of the prompt, its frozen part, and what the model does without it, removed in two ways."""

    position: int = Field(description="position of the token in the input, from 0")
    text: str = Field(description="text of the token, control characters escaped")
    part: Annotated[Finite, _TOTAL] = Field(description="frozen part of the token, through all blocks")
    cut: Annotated[Finite | None, _LOST] = Field(
        description="how much of the logit is lost when no token may attend to this one; null where that cannot be cut"
    )
    cut_kl: Annotated[Finite | None, _KL] = Field(
        description="divergence of the target's output distribution when no token may attend to this one"
    )
    replaced: Annotated[Finite | None, _LOST] = Field(
        description="how much of the logit is lost when the token's embedding is the mean of the vocabulary's"
    )
    replaced_kl: Annotated[Finite | None, _KL] = Field(
        description="divergence of the target's output distribution when the token's embedding is the vocabulary's mean"
    )


class Agreement(WithReasons):
    """How well the frozen parts of leading heads, neurons or tokens order the measured changes."""

    what: str = Field(
        description="kind and reading of the parts, and the way of removal, such as 'tokens, attention cut'"
    )
    count: int = Field(description="number of parts whose removal was measured")
    rank_correlation: Annotated[Finite | None, Meaning("-1 to 1", "measured", source="Spearman", signed=True)] = Field(
        description="rank correlation of frozen parts and measured changes, over the leading ones alone; null for "
        "fewer than 4, or where all are alike"
    )


class MeasuredParts(Result):
    """Effects of removing the leading parts for real, one at a time. Frozen parts are not causal; these effects are."""

    heads: list[RemovedPart] = Field(description="leading heads by `moved`, each set to zero at every token")
    neurons: list[RemovedPart] = Field(description="leading neurons by their part, each set to zero at every token")
    tokens: list[RemovedToken] = Field(description="leading tokens by their part, each removed alone in two ways")
    agreement: list[Agreement]
    skipped: list[Skipped] = Field(description="heads, neurons and removals of tokens that are left out, and why")


class Rival(TokenName):
    """The token, or class, that the model's output finds most probable beside the target."""

    probability: Annotated[Finite, _PROBABILITY] = Field(description="probability of the rival at the target's output")


class Attribution(WithReasons):
    """Attribution of each prediction: one prompt, one position, one target."""

    prompt: int = Field(description="number of the prompt, from 0")
    position: int | None = Field(description="position of the attributed output, from 0; null where a prompt has one")
    target: TargetFacts
    logit: Annotated[Finite, _LOGIT] = Field(
        description="attributed number: the untouched model's logit of the target, less the logit or mean held "
        "against it"
    )
    capped: Annotated[Finite | None, _LOGIT] = Field(
        description="attributed number behind the cap of the model's logits; null where the model caps nothing"
    )
    rank: int | None = Field(description="rank of the target among all tokens or classes, from 1; null without a head")
    probability: Annotated[Finite | None, _PROBABILITY] = Field(
        default=None,
        description="probability of the target; null where the output is no distribution over tokens or classes",
    )
    rival: Rival | None = Field(
        default=None, description="most probable token or class beside the target; null where there is no `probability`"
    )
    parts: Parts
    direct: Direct
    flows: list[Flow]
    measured: MeasuredParts | None = Field(description="effects of removing the leading parts for real, with --measure")
    residual: Annotated[Finite, _RESIDUAL] = Field(description="distance of the parts' sum from the model's own logit")


class Source(Result):
    """A token of a text, and its part in all tokens of a continuation together."""

    position: int = Field(description="position of the token in the input, from 0")
    text: str = Field(description="text of the token, control characters escaped")
    value: Annotated[Finite, _TOTAL] = Field(
        description="part of the token's vector and of the UAT terms computed at the token, in the whole continuation"
    )


class Continuation(WithReasons):
    """The tokens behind a prompt, greedy or given; they are attributed one by one, and the parts added here."""

    prompt: int = Field(description="number of the prompt, from 0")
    tokens: list[TokenName] = Field(description="tokens of the continuation, greedy or given")
    logits: Annotated[Finite, _LOGIT] = Field(description="sum of the attributed numbers of the continuation's tokens")
    log_probability: Annotated[Finite | None, Meaning("nats", "measured", signed=True)] = Field(
        description="log-probability of a given continuation in the untouched model; null for greedy tokens"
    )
    first_order_error: Annotated[
        Finite | None,
        Meaning("nats", "exact", formula="sum over tokens of log V - entropy of the model's distribution"),
    ] = Field(
        description="how much more the true log-probability of a given continuation gains than the linearised one, "
        "z_t less the mean of z under the model's own distribution, on the way from equal logits z to the model's; "
        "null for greedy tokens"
    )
    sources: list[Source] = Field(description="tokens in front of the last one, with their parts in the continuation")


class Spread(Result):
    """Numbers of a part over all predictions."""

    block: int = Field(description="number of the block, from 0")
    unit: int | None = Field(description="number of the unit's call among the block's, from 0; null for a head")
    expert: int | None = Field(description="number of the expert that holds the neuron, from 0; null where none does")
    index: int = Field(description="number of the head in its block, or of the neuron in its unit or expert, from 0")
    mean: Annotated[Finite, _TOTAL] = Field(description="mean part of the head (`moved`) or neuron, over predictions")
    mean_absolute: Annotated[Finite, Meaning("logits", "exact", formula="mean of |part|")] = Field(
        description="mean of the absolute part of the head (`moved`) or neuron, over predictions"
    )
    deviation: Annotated[Finite, Meaning("logits", "exact", formula="standard deviation of the part, by n")] = Field(
        description="standard deviation of the part of the head (`moved`) or neuron from prediction to prediction"
    )


class Summary(Result):
    """Means over all predictions, and the heads and neurons that lead in the mean of absolute parts."""

    predictions: int = Field(description="number of predictions")
    logit: Annotated[Finite, _LOGIT] = Field(description="mean attributed number over predictions")
    tokens: Annotated[Finite, _TOTAL] = Field(description="mean over predictions of the part of all tokens together")
    static: Annotated[Finite, _TOTAL] = Field(description="mean over predictions of the part of all biases together")
    units: Annotated[list[Finite], _TOTAL] = Field(description="mean over predictions of each block's units' part")
    head_bias: Annotated[Finite, _TOTAL] = Field(description="mean part of the biases behind the last block")
    encoder: Annotated[Finite | None, _TOTAL] = Field(
        default=None, description="mean over predictions of the part of the encoder's states, in a decoder; else null"
    )
    heads: list[Spread] = Field(description="heads that lead in the mean absolute part that passes through them")
    neurons: list[Spread] = Field(description="neurons that lead in the mean absolute part")


class AttributionCertificate(Result):
    """How far the parts are from the untouched model's own output."""

    residual: Annotated[Finite, _RESIDUAL] = Field(description="largest `residual` of all attributions, both readings")
    tolerance: Annotated[Finite, Meaning("relative", "given")] = Field(
        description="largest residual that counts as exact, by the dtype of the arithmetic"
    )
    exact: bool = Field(description="whether `residual` is at most the tolerance")


class AttributeReport(ModelReport, WithReasons):
    """`duat attribute`: what each prediction is made of."""

    command: Annotated[Literal["attribute"], COMMAND] = "attribute"
    prompts: list[PromptFacts]
    certificate: AttributionCertificate
    held: list[str] = Field(description="what is held fixed between the last block and the logits")
    attribution: list[Attribution]
    continuations: list[Continuation] = Field(description="continuation of each prompt, with --steps or --continuation")
    summary: Summary | None = Field(description="means over all predictions; null where there is only one")
    skipped: list[Skipped] = Field(description="parts of the model outside the sum, with reasons")
    warnings: Warnings
    run: Run
