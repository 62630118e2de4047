"""Predictions of a model on the prompts: the `behaviour` section of `duat check`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import Finite, Share, WithReasons
from duat_cli.results.meaning import Meaning

Predicts = Literal["next token", "masked token", "class", "token class", "embedding"]
CLASSES = ("class", "token class")
"""The members of `Predicts` that a classifier predicts."""
NOT_FINITE = "it is not finite"
"""Why a loss that was computed has no value."""
_NATS = "nats per token"


class TunedBehaviour(WithReasons):
    """The model with the adapter of --adapter applied, on the same prompts."""

    loss_per_token: Annotated[Finite | None, Meaning(_NATS, "exact", formula="as of the model itself")] = Field(
        description="mean loss of the model with the adapter's changes added to the weights; null where that cannot run"
    )


class Behaviour(WithReasons):
    """Predictions of the model on the prompts.

    A model of the next token predicts at every token of a prompt. A masked language model predicts every seventh token,
    from the second on, special tokens excepted, with all of these masked in one pass. A classifier predicts the class
    of each prompt, or of each of its tokens. A model without such a head gives its embeddings.
    """

    predicts: Predicts = Field(
        description="what the model predicts; an embedding where it has no head over its tokens and no classes that "
        "exclude each other"
    )
    predictions: int = Field(
        description="number of predictions that the model was asked for: one a token, or one a prompt"
    )
    scored: int = Field(description="number of predictions with a known answer, over which the loss is a mean")
    scored_bytes: Annotated[int | None, Meaning("bytes", "exact")] = Field(
        description="UTF-8 bytes of the text that the known answers stand for; null where the tokenizer does not say, "
        "and where no tokens are predicted"
    )
    vocabulary: int | None = Field(
        description="number V of tokens, or classes, that a prediction is a distribution over"
    )
    loss_per_token: Annotated[
        Finite | None,
        Meaning(
            _NATS,
            "exact",
            formula="-(1/n) Σ log p(token), over the n scored tokens of all prompts, float64",
            drift="number",
            better="lower",
        ),
    ] = Field(
        description="mean negative log likelihood of the prompts' own tokens; of a masked language model of the masked "
        "ones, its pseudo-loss; `uniform` of a model that takes all tokens for equally likely"
    )
    loss_per_byte: Annotated[
        Finite | None,
        Meaning("nats per byte", "exact", formula="n loss_per_token / scored_bytes", drift="number", better="lower"),
    ] = Field(
        description="negative log likelihood of the prompts' own tokens by the bytes of their text, which can be "
        "compared between tokenizers"
    )
    uniform: Annotated[Finite | None, Meaning("nats", "exact", formula="log V")] = Field(
        description="loss of the uniform distribution over the vocabulary: the null of `loss_per_token`; of a "
        "classifier over its classes: the largest entropy"
    )
    unigram: Annotated[
        Finite | None,
        Meaning(_NATS, "exact", formula="-(1/n) Σ log(c(token) / (n - 1 + V)), c its count among the n scored tokens"),
    ] = Field(
        description="loss of the prompts' own token counts, each token left out of the counts that predict it and one "
        "added to every count: a null that has seen the prompts, but no token that it is asked for"
    )
    entropy: Annotated[
        Finite | None, Meaning("nats", "exact", formula="mean over the predictions of -Σ_v p_v log p_v", drift="number")
    ] = Field(
        description="mean entropy of the predicted distributions: 0 where the model is certain, `uniform` where all "
        "tokens, or classes, are equally likely"
    )
    largest_logit: Annotated[Finite | None, Meaning("logits", "measured", formula="max |logit|")] = Field(
        description="largest absolute value of a finite logit, over all predictions"
    )
    logit_range: Annotated[
        Finite | None,
        Meaning("logits", "measured", formula="mean over the predictions of max_v logit - min_v logit", drift="norm"),
    ] = Field(
        description="difference of the largest and the smallest finite logit of a prediction, mean over the predictions"
    )
    never_predicted: Annotated[
        Share | None, Meaning("share, 0 to 1", "measured", formula="share of v with p_v < 1/V in every prediction")
    ] = Field(
        description="share of the vocabulary, or of the classes, to which no prediction gives the probability 1/V or "
        "more; it falls with the number of prompts, so that it tells a model from itself on the same prompts, and no "
        "more"
    )
    nonfinite_logits: Annotated[int | None, Meaning("count", "exact")] = Field(
        description="number of logits that are NaN or +Inf; -Inf is how a model rules a token out"
    )
    agreement: Annotated[Share | None, Meaning("share, 0 to 1", "measured", needs="baseline")] = Field(
        description="share of the predictions that the baseline holds whose most likely token, or class, is the same "
        "here, or another within the rounding of the dtype"
    )
    near_ties: Annotated[int | None, Meaning("count", "measured", needs="baseline")] = Field(
        description="number of predictions whose most likely token, or class, is not the baseline's, by a margin "
        "within the rounding of the dtype"
    )
    kl: Annotated[
        Finite | None,
        Meaning(
            "nats",
            "exact",
            formula="mean over the predictions of Σ_c p_c log(p_c / q_c), p the baseline's, of six digits each",
            needs="baseline",
        ),
    ] = Field(
        description="Kullback-Leibler divergence of a classifier's distribution over its classes from the baseline's; "
        "null of other models, whose distributions a baseline does not hold"
    )
    cosine: Annotated[
        Finite | None,
        Meaning(
            "cosine, -1 to 1",
            "estimate",
            how="from sketches of eight numbers; standard error in `cosine_error`",
            formula="mean over prompts of 1 - |e - e'|² / 2, e the mean of the last hidden states over |it|",
            signed=True,
            needs="baseline",
        ),
    ] = Field(description="cosine of a prompt's embedding to the baseline's, mean over the prompts")
    cosine_error: Annotated[
        Finite | None, Meaning("cosine", "bound", how="of the standard error, at most", needs="baseline")
    ] = Field(description="standard error of `cosine`, at most: half of 1 - cosine for one prompt, less for several")
    tuned: TunedBehaviour | None = Field(
        description="predictions of the model with the adapter of --adapter on the same prompts; null without an "
        "adapter"
    )
