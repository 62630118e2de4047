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

    position: int = Field(description="of the token, from 0")
    id: int | None = Field(
        default=None,
        description="of the token in the vocabulary; null of a vector that blocks read in the place of tokens, and of "
        "a state that stands for none",
    )
    text: str = Field(description="the token, control characters escaped")
    value: Annotated[Finite, _TOTAL] = Field(description="what it adds, through all blocks")
    direct: Annotated[Finite, _DIRECT] = Field(description="what it adds along the residual stream alone")


class StaticPart(Result):
    """Part of the biases, at the output of each block; those of an FFN's last layer are included."""

    value: Annotated[Finite, _TOTAL] = Field(description="of all blocks")
    blocks: Annotated[list[Finite], _TOTAL] = Field(description="of each block")


class UnitPart(WithReasons):
    """The UAT term of one call of a nonlinear unit, such as a block's FFN, without its output bias."""

    block: int = Field(description="number of the block, from 0")
    unit: int = Field(description="number of the call among the block's, from 0")
    name: str = Field(description="class of the unit; two, where one scales the other and only both together add")
    mixes: bool = Field(description="whether it mixes tokens, and so is no FFN")
    value: Annotated[Finite, _TOTAL] = Field(description="what it adds, through all later blocks")
    tokens: Annotated[list[Finite] | None, _TOTAL] = Field(
        description="the same by the token at which it was computed; null where its output has no row a token"
    )


class InnerPart(Result):
    """Part of one neuron or expert, which is included in the value of its unit."""

    block: int = Field(description="number of the block, from 0")
    unit: int = Field(description="number of the unit's call among the block's")
    expert: int | None = Field(description="of a neuron inside an expert: the expert's number; else null")
    index: int = Field(description="of the neuron or expert in its unit, or of the neuron in its expert")
    value: Annotated[Finite, _TOTAL] = Field(description="what it adds, through all later blocks")
    direct: Annotated[Finite, _DIRECT] = Field(description="what it writes straight to the logit")


class EncoderPart(Result):
    """Part of the encoder's states through cross-attention, its weights H held; its biases count as static."""

    value: Annotated[Finite, _TOTAL] = Field(description="of all blocks and states, through all later blocks")
    direct: Annotated[Finite, _DIRECT] = Field(description="what cross-attention writes of them straight to the logit")
    blocks: Annotated[list[Finite], _TOTAL] = Field(description="through the cross-attention of each block")
    tokens: list[TokenPart] = Field(description="of each state: the token of the encoder's input that it stands for")


class PicturePart(Result):
    """Sum of the parts at the positions that a picture takes in the text: of its `tokens`, and of units there. These
    parts are already counted in `tokens` and units."""

    positions: int = Field(description="how many positions hold pieces of pictures")
    value: Annotated[Finite, _TOTAL] = Field(description="their own parts: what the vision part of the model put there")
    direct: Annotated[Finite, _DIRECT] = Field(description="what that writes straight to the logit")
    computed: Annotated[Finite, _TOTAL] = Field(description="UAT terms computed at these positions, of all blocks")


class Parts(Result):
    """The total reading: each part through all later blocks, which are frozen. The parts add up to the logit."""

    tokens: list[TokenPart]
    static: StaticPart
    units: list[UnitPart]
    head_bias: Annotated[Finite, _TOTAL] = Field(
        description="what the way from the last block to the output gives for zeros: biases of its norm and layers"
    )
    neurons: list[InnerPart] = Field(
        description="the leading neurons of all units, by absolute value; those of an expert add up to its part, but "
        "for its output bias"
    )
    experts: list[InnerPart] = Field(description="the leading experts of all units, by absolute value")
    encoder: EncoderPart | None = Field(
        default=None, description="of the encoder's states; in a decoder (--stack decoder), null in other stacks"
    )
    picture: PicturePart | None = Field(
        default=None, description="of pictures within the text (--image, --inputs); null where there are none"
    )


class HeadPart(Result):
    """One attention head."""

    block: int = Field(description="number of the block, from 0")
    head: int = Field(description="number of the head, from 0")
    value: Annotated[Finite, _DIRECT] = Field(description="what it writes straight to the logit: one of the parts")
    moved: Annotated[Finite, _TOTAL] = Field(
        description="how much of the logit passes through this head, from token to token and through all later blocks. "
        "It is in the parts of tokens, biases and units already: not to be added to them"
    )


class DirectUnit(Result):
    """One unit's call."""

    block: int = Field(description="number of the block, from 0")
    unit: int = Field(description="number of the call among the block's")
    value: Annotated[Finite, _DIRECT] = Field(description="what it writes straight to the logit")


class Direct(Result):
    """The direct reading: the part that each component writes straight to the logit, past all later blocks' attention
    and units, through the frozen norms on the residual stream. The parts add up to the logit."""

    tokens: Annotated[Finite, _DIRECT] = Field(description="of all tokens: embedding and position")
    static: Annotated[Finite, _DIRECT] = Field(description="of the biases outside attention, which heads hold")
    heads: list[HeadPart]
    units: list[DirectUnit]
    head_bias: Annotated[Finite, _DIRECT] = Field(description="as of the parts")
    neurons: list[InnerPart] = Field(description="those that lead by what they write straight to the logit")
    experts: list[InnerPart] = Field(description="those that lead by what they write straight to the logit")
    residual: Annotated[Finite, _RESIDUAL] = Field(description="how far the sum is from the model's own logit")


class Move(Result):
    """Part that a head moved from one token to another."""

    source: int = Field(description="position that it was taken from")
    target: int = Field(description="position that it was put to")
    value: Annotated[Finite, _TOTAL] = Field(description="the part of the head's `moved`")
    attention: Annotated[Finite, Meaning("entry of H", "exact", signed=True)] = Field(description="H_h[target, source]")
    carried: Annotated[Finite, _TOTAL] = Field(description="what the source's value would add at full attention")


class Flow(Result):
    """The largest moves of a leading head."""

    block: int = Field(description="number of the block, from 0")
    head: int = Field(description="number of the head, from 0")
    moved: Annotated[Finite, _TOTAL] = Field(description="of all its moves")
    moves: list[Move] = Field(description="the largest, by absolute value")


class TokenName(Result):
    """A token of the vocabulary, a class of a classifier, or a component of a vector."""

    id: int = Field(description="its place in the output")
    text: str = Field(description="the token or class, control characters escaped")


class TargetFacts(WithReasons):
    """The target of an attribution, such as a token, a class or a norm."""

    kind: Literal["token", "class", "component", "norm", "log-probability"] = Field(
        description="a token of the vocabulary; its log-probability, linearised; a class; or, of a model without a "
        "head, a component or the norm of the mean of its last hidden states, the norm along the vector's own direction"
    )
    token: TokenName | None = Field(description="what the number belongs to; null for a norm")
    given: bool = Field(description="whether it was asked for; otherwise the model's own first choice")
    against: TokenName | None = Field(description="whose logit is subtracted")
    against_mean: bool = Field(description="whether the mean logit of the vocabulary is subtracted")


class RemovedPart(WithReasons):
    """A head or neuron, its frozen part, and what the model does without it. Where a norm is attributed, the loss is
    measured on the length itself, while parts are along the direction that the vector had."""

    block: int = Field(description="number of the block, from 0")
    unit: int | None = Field(description="of a neuron: number of the unit's call among the block's")
    expert: int | None = Field(description="of a neuron inside an expert of a mixture: that expert, from 0")
    index: int = Field(description="number of the head in its block, or of the neuron in its unit or expert")
    part: Annotated[Finite, _TOTAL] = Field(description="its frozen part, through all later blocks; of a head, `moved`")
    direct: Annotated[Finite | None, _DIRECT] = Field(description="of a head: what it writes straight to the logit")
    change: Annotated[Finite | None, _LOST] = Field(
        description="how much of the logit is lost when it is set to zero; of a norm: of the length itself, while its "
        "part is along the direction that the vector had"
    )
    kl: Annotated[Finite | None, _KL] = Field(description="of the output's distribution there when it is set to zero")


class RemovedToken(WithReasons):
    """A token of the prompt, its frozen part, and what the model does without it, removed in two ways."""

    position: int = Field(description="of the token, from 0")
    text: str = Field(description="the token, control characters escaped")
    part: Annotated[Finite, _TOTAL] = Field(description="its frozen part, through all blocks")
    cut: Annotated[Finite | None, _LOST] = Field(
        description="how much of the logit is lost when no token may attend to it"
    )
    cut_kl: Annotated[Finite | None, _KL] = Field(
        description="of the distribution of the output there when no token may attend to it"
    )
    replaced: Annotated[Finite | None, _LOST] = Field(
        description="how much of the logit is lost when its embedding is the mean of the vocabulary's"
    )
    replaced_kl: Annotated[Finite | None, _KL] = Field(
        description="of the distribution of the output there when the token's embedding is the mean of the vocabulary's"
    )


class Agreement(WithReasons):
    """How well frozen parts order measured changes."""

    what: str = Field(description="which parts, removed in which way")
    count: int = Field(description="how many were removed")
    rank_correlation: Annotated[Finite | None, Meaning("-1 to 1", "measured", source="Spearman", signed=True)] = Field(
        description="of frozen parts and measured changes, over the leading ones alone"
    )


class MeasuredParts(Result):
    """Effects of removing the leading parts for real, one at a time. Frozen parts are not causal; these effects are."""

    heads: list[RemovedPart]
    neurons: list[RemovedPart]
    tokens: list[RemovedToken]
    agreement: list[Agreement]
    skipped: list[Skipped] = Field(description="heads and neurons that are taken out in no case, and why")


class Rival(TokenName):
    """The token, or class, that the model's output finds most probable beside the target."""

    probability: Annotated[Finite, _PROBABILITY] = Field(description="of that token or class at that output")


class Attribution(WithReasons):
    """One prediction: one prompt, one position, one target."""

    prompt: int = Field(description="number of the prompt, from 0")
    position: int | None = Field(description="whose output it is, from 0; null where a prompt has one output")
    target: TargetFacts
    logit: Annotated[Finite, _LOGIT] = Field(description="the untouched model's, less that it is held against")
    capped: Annotated[Finite | None, _LOGIT] = Field(
        description="what the model makes of it behind its cap; null where nothing stands behind the logit"
    )
    rank: int | None = Field(description="of the target among all tokens or classes, from 1; null without a head")
    probability: Annotated[Finite | None, _PROBABILITY] = Field(
        default=None,
        description="of the target at that output; null where that is no distribution over tokens or classes",
    )
    rival: Rival | None = Field(
        default=None, description="the most probable other token or class; null where there is no probability"
    )
    parts: Parts
    direct: Direct
    flows: list[Flow]
    measured: MeasuredParts | None = Field(description="with --measure: the leading parts taken out for real")
    residual: Annotated[Finite, _RESIDUAL] = Field(
        description="how far the sum of the parts is from the model's own logit: the certificate"
    )


class Source(Result):
    """A token of a text, and its part in all tokens of a continuation together."""

    position: int = Field(description="of the token, from 0")
    text: str = Field(description="the token, control characters escaped")
    value: Annotated[Finite, _TOTAL] = Field(description="its own part and the UAT terms computed at it, added")


class Continuation(WithReasons):
    """The tokens behind a prompt, greedy or given; they are attributed one by one, and the parts added here."""

    prompt: int = Field(description="number of the prompt, from 0")
    tokens: list[TokenName]
    logits: Annotated[Finite, _LOGIT] = Field(description="sum of what was attributed, over the tokens")
    log_probability: Annotated[Finite | None, Meaning("nats", "measured", signed=True)] = Field(
        description="of a given continuation: the untouched model's, all tokens together"
    )
    first_order_error: Annotated[
        Finite | None,
        Meaning("nats", "exact", formula="sum over tokens of log V - entropy of the model's distribution"),
    ] = Field(
        description="of a given continuation: how much more the true log-probability gains than the linearised one, "
        "z_t less the mean of z under the model's own distribution, on the way from equal logits z to the model's"
    )
    sources: list[Source] = Field(description="the tokens in front of the last one")


class Spread(Result):
    """Numbers of a part over all predictions."""

    block: int = Field(description="number of the block, from 0")
    unit: int | None = Field(description="of a neuron: number of the unit's call among the block's; null for a head")
    expert: int | None = Field(description="of a neuron inside an expert: the expert's number; else null")
    index: int = Field(description="number of the head in its block, or of the neuron in its unit or expert")
    mean: Annotated[Finite, _TOTAL] = Field(description="mean part")
    mean_absolute: Annotated[Finite, Meaning("logits", "exact", formula="mean of |part|")] = Field(
        description="mean absolute part"
    )
    deviation: Annotated[Finite, Meaning("logits", "exact", formula="standard deviation of the part, by n")] = Field(
        description="how much it differs from prediction to prediction"
    )


class Summary(Result):
    """Means over all predictions, and the heads and neurons that lead in the mean of absolute parts."""

    predictions: int = Field(description="how many")
    logit: Annotated[Finite, _LOGIT] = Field(description="mean logit")
    tokens: Annotated[Finite, _TOTAL] = Field(description="mean of what all tokens add")
    static: Annotated[Finite, _TOTAL] = Field(description="mean of what all biases add")
    units: Annotated[list[Finite], _TOTAL] = Field(description="mean of what the units of each block add")
    head_bias: Annotated[Finite, _TOTAL] = Field(description="mean of the head's bias")
    encoder: Annotated[Finite | None, _TOTAL] = Field(
        default=None, description="mean of what the encoder's states bring; in a decoder, null in other stacks"
    )
    heads: list[Spread] = Field(description="by what they moved")
    neurons: list[Spread]


class AttributionCertificate(Result):
    """How far the parts are from the untouched model's own output."""

    residual: Annotated[Finite, _RESIDUAL] = Field(description="the largest, of both readings and all attributions")
    tolerance: Annotated[Finite, Meaning("relative", "given")] = Field(description="by the dtype of the arithmetic")
    exact: bool = Field(description="residual is at most the tolerance")


class AttributeReport(ModelReport, WithReasons):
    """`duat attribute`: what each prediction is made of."""

    command: Annotated[Literal["attribute"], COMMAND] = "attribute"
    prompts: list[PromptFacts]
    certificate: AttributionCertificate
    held: list[str] = Field(description="what is held fixed between the last block and the logits")
    attribution: list[Attribution]
    continuations: list[Continuation] = Field(description="with --steps or --continuation: one a prompt")
    summary: Summary | None = Field(description="of two predictions or more")
    skipped: list[Skipped] = Field(description="parts of the model outside the sum, with reasons")
    warnings: Warnings
    run: Run
