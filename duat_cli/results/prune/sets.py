"""Sets of terms in the report of `duat prune-bound`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.meaning import Meaning
from duat_cli.results.prune.repair import SetRepair, ShareOfKind
from duat_cli.results.prune.rivals import CriterionSet
from duat_cli.results.prune.terms import ABLATED, CONFIDENCE, COUNT
from duat_cli.text import exactly

_OF_SET = Meaning(
    "the metric's", "estimate", how="linearised, the set's responses added before they are squared", signed=True
)
_BUDGET = Meaning("the metric's", "given", formula="--budget")


class CurvePoint(Result):
    """One of the nested sets."""

    removed: int = Field(description="how many terms are removed")
    share: ShareOfKind
    predicted: Annotated[Finite, _OF_SET] = Field(description="predicted damage of removing the set")
    measured: Annotated[Finite | None, ABLATED] = Field(
        description="damage of really removing the set, mean over the prompts"
    )


class SetSize(WithReasons):
    """Terms, parameters and bytes that a checkpoint saves without a set of terms."""

    terms_removed: Annotated[int, COUNT] = Field(
        description="terms that can leave the file, where the config can state what is left, which --apply proves: "
        "whole blocks, and of every FFN and attention as many neurons, and key and value heads with their heads, as "
        "all of them lose, though never all; the others are zeroed and still stored"
    )
    parameters_removed: Annotated[int, Meaning("parameters", "exact")] = Field(
        description="parameters of the terms that can leave the file"
    )
    parameters_zeroed: Annotated[int | None, Meaning("parameters", "exact")] = Field(
        description="parameters that are set to zero and still stored"
    )
    bytes_removed: Annotated[int, Meaning("bytes", "exact", formula="parameters_removed x bytes a value")] = Field(
        description="bytes that the file gets smaller by, in the dtype that most of its tensors are stored in"
    )


class SketchRound(Result):
    """Gain from sketching the model again: the set of the rounds so far beside one of a single round."""

    removed: Annotated[int, COUNT] = Field(description="how many terms are removed at the end of this round")
    measured: Annotated[Finite, ABLATED] = Field(description="damage of really removing them, mean over the prompts")
    single_removed: Annotated[int, COUNT] = Field(
        description="terms of the set of a single round that holds as many parameters"
    )
    single_measured: Annotated[Finite, ABLATED] = Field(description="damage of really removing that set")


class HeldOut(Result):
    """Effect of removing a set, on prompts that played no part in choosing it."""

    removed: Annotated[int, COUNT] = Field(description="how many terms are removed")
    share: ShareOfKind
    prompts: Annotated[int, Meaning("prompts", "exact")] = Field(
        description="held-out prompts that it was run on: not all where it had failed before, or a smaller one had"
    )
    mean: Annotated[Finite, ABLATED] = Field(description="mean damage over these prompts")
    percentile_90: Annotated[Finite, ABLATED] = Field(description="a tenth of these prompts have a larger damage")
    exceeded: int = Field(description="how many of these prompts have a damage above the budget")
    share_exceeded: Annotated[Finite, Meaning("share of prompts", "measured")] = Field(
        description="share of these prompts that have a damage above the budget"
    )
    limit: Annotated[
        Finite | None,
        Meaning(
            "the metric's",
            "bound",
            how="with the report's confidence, for prompts drawn as the held-out ones; of each set by itself",
            formula="the largest damage but k, k the most with P(Bin(n, share) <= k) <= 1 - confidence",
            signed=True,
            source="Wilks (1941): tolerance limits by order statistics",
        ),
    ] = Field(
        description="with this confidence at most --exceed of prompts have a larger damage; null if the set was not "
        "run on all held-out prompts"
    )


class Guarantee(WithReasons):
    """A statement about prompts that played no part in choosing the set."""

    budget: Annotated[Finite, _BUDGET] = Field(description="the largest damage allowed")
    confidence: Annotated[Finite, CONFIDENCE] = Field(description="with which probability the guarantee holds")
    share_above_limit: Annotated[
        Finite,
        Meaning(
            "share of prompts",
            "given",
            how="the test is exact for prompts drawn as the held-out ones",
            formula="--exceed; a set passes if P(Bin(n, share) <= exceeded) <= 1 - confidence for n held-out prompts",
            source="Clopper & Pearson (1934); nested sets tested in a fixed order",
        ),
    ] = Field(
        description="with this confidence, at most this share of prompts (drawn as the held-out ones were) has a "
        "damage above the budget"
    )
    exceeded: int = Field(description="held-out prompts whose damage did exceed it")
    may_exceed: int | None = Field(
        default=None, description="how many of so many held-out prompts may have such a damage for a set to pass"
    )
    holdout_prompts: int = Field(description="how many prompts were held out")
    holdout_sha256: str = Field(description="of the held-out prompts' own sha256, one a line")
    method: str = Field(description="how the statement was tested")
    tested: list[int] = Field(
        description="sizes of the sets to be tested, in this order, up to the plan's set: five of them (--effort quick "
        "three, thorough sixteen), about as far from each other"
    )
    removed: int = Field(description="size of the last set that passed; 0 if the first one tested did not")
    share: ShareOfKind
    saves: SetSize | None = Field(description="what a checkpoint without this set no longer holds")
    set: list[str] = Field(description="the first of the plan's set, as many as removed")

    @property
    def share_exceeding(self) -> str:
        """The guarantee in words: 'with 95% confidence: at most 5% of prompts'."""
        return f"with {exactly(self.confidence)}% confidence: at most {exactly(self.share_above_limit)}% of prompts"


class MeanGuarantee(WithReasons):
    """A statement about the mean damage, from prompts that played no part in choosing the set."""

    budget: Annotated[Finite, _BUDGET] = Field(description="the largest mean damage allowed")
    confidence: Annotated[Finite, CONFIDENCE] = Field(description="with which probability the guarantee holds")
    most: Annotated[Finite, Meaning("the metric's", "given", formula="5 budget")] = Field(
        description="what one prompt's damage counts for in the mean, at most: a mean of damages without a bound could "
        "not be bounded from any number of prompts"
    )
    counted_for_less: int = Field(description="held-out prompts whose damage is larger than that")
    mean: Annotated[Finite | None, ABLATED] = Field(
        description="mean damage of this set on the held-out prompts, each counted in full"
    )
    holdout_prompts: int = Field(description="how many prompts were held out")
    holdout_sha256: str = Field(description="of the held-out prompts' own sha256, one a line")
    method: str = Field(description="how the statement was tested")
    tested: list[int] = Field(description="sizes of the sets to be tested, in this order, as of guarantee")
    removed: int = Field(description="size of the last set that passed; 0 if the first one tested did not")
    share: ShareOfKind


_COSINE = Meaning(
    "-1 to 1",
    "measured",
    formula="<u, v> / (|u| |v|), u and v the pooled final hidden states of the model and of the ablated one",
    how="before any layer that the embedder has behind its pooling",
    signed=True,
)


class PooledCosine(WithReasons):
    """How far a set turns the pooled output of an embedder, a model that predicts neither tokens nor classes."""

    granularity: str = Field(description="the kinds of terms, as of the plan")
    removed: Annotated[int, COUNT] = Field(description="how many terms the set has: the plan's, or the guaranteed one")
    pooling: str = Field(
        description="what is made of the final hidden states: as 1_Pooling/config.json states it, else their mean"
    )
    mean: Annotated[Finite, _COSINE] = Field(description="mean cosine over the prompts that chose the set")
    lowest: Annotated[Finite, _COSINE] = Field(description="lowest cosine of one of them")
    held_out_mean: Annotated[Finite | None, _COSINE] = Field(description="mean cosine over the held-out prompts")
    held_out_lowest: Annotated[Finite | None, _COSINE] = Field(description="lowest cosine of one of them")


class Plan(WithReasons):
    """The largest set of one kind within the budget."""

    granularity: str = Field(
        description="the kind of terms: neuron, head, expert, ffn, attention or block; several with commas, such as "
        "neuron,head, if they go into one set"
    )
    budget: Annotated[Finite, _BUDGET] = Field(description="the largest damage allowed")
    remove: Annotated[Finite | None, Meaning("share, 0 to 1", "given", formula="--remove")] = Field(
        description="share of the parameters that the set was to hold, whatever the damage; null: as much as the "
        "budget allows"
    )
    removed: Annotated[int, COUNT] = Field(description="how many terms are removed")
    of: Annotated[int, COUNT] = Field(description="how many terms of this kind there are")
    share: Annotated[Finite, Meaning("share, 0 to 1", "exact", formula="removed / of")] = Field(
        description="share of the terms of this kind"
    )
    parameters: Annotated[
        int,
        Meaning(
            "parameters",
            "exact",
            how="a head counts with its share of all that the attention holds, also of keys and values, which leave "
            "with all heads that use them, and biases behind the heads, which stay; what blocks share counts in each",
        ),
    ] = Field(description="parameters that the removed terms hold")
    parameters_share: Annotated[Finite, Meaning("share, 0 to 1", "exact")] = Field(
        description="share that they are of the parameters in parameters_of"
    )
    parameters_of: Literal["blocks", "all"] = Field(
        description="which parameters the share is of: those of the blocks, or all of the model"
    )
    predicted: Annotated[Finite | None, _OF_SET] = Field(description="predicted damage of removing the set")
    measured: Annotated[Finite | None, ABLATED] = Field(
        description="mean over the prompts that chose the set, with --repair of the repaired model; at most the "
        "budget, by that choice, without --remove"
    )
    uniform: bool = Field(
        description="whether every FFN loses as many neurons, and every attention as many key and value heads with "
        "the heads that use them (--uniform)"
    )
    rounds: list[SketchRound] = Field(description="of --rounds: what each brought over a single one")
    saves: SetSize | None = Field(description="what a checkpoint without the set no longer holds")
    curve: list[CurvePoint]
    held_out: list[HeldOut] = Field(description="the sets that were run on held-out prompts, from the smallest")
    criteria: list[CriterionSet] = Field(
        default_factory=list,
        description="of --criteria: on the held-out prompts, sets that other criteria choose, and random ones, beside "
        "duat's own of as many parameters; none without a chosen set",
    )
    guarantee: Guarantee | None
    mean_guarantee: MeanGuarantee | None
    repair: SetRepair | None = Field(
        description="what --repair refits; held_out, guarantee and mean_guarantee are then of the repaired model, "
        "predicted and curve of the set alone"
    )
    set: list[str] = Field(
        description="kind, block and index of its terms as block.3.head.1 (block.3 for a block), in the order of "
        "removal: a smaller set of the curve is the beginning of this one"
    )

    @property
    def remove_option(self) -> str | None:
        """The option that set the plan's size, such as '--remove 20%/all'; None where the budget set it."""
        if not self.remove:
            return None
        return f"--remove {100 * self.remove:g}%{'/all' if self.parameters_of == 'all' else ''}"
