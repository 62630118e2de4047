"""Sets of terms in the report of `duat prune-bound`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.kinds import Kind
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
    """One of the nested sets of the plan's order, with its predicted and its measured damage."""

    removed: int = Field(description="number of terms that the set removes")
    share: ShareOfKind
    predicted: Annotated[Finite, _OF_SET] = Field(description="predicted damage of removing the set")
    measured: Annotated[Finite | None, ABLATED] = Field(
        description="damage of really removing the set, mean over the prompts"
    )


class SetSize(WithReasons):
    """Terms, parameters and bytes that a checkpoint saves without a set of terms."""

    terms_removed: Annotated[int, COUNT] = Field(
        description="number of the set's terms that can leave the file, where the config can state what is left, which "
        "--apply proves: whole blocks, and of every FFN and attention as many neurons, and key and value heads with "
        "their heads, as all of them lose, though never all; the others are zeroed and still stored"
    )
    parameters_removed: Annotated[int, Meaning("parameters", "exact")] = Field(
        description="number of parameters of the set's terms that can leave the file"
    )
    parameters_zeroed: Annotated[int | None, Meaning("parameters", "exact")] = Field(
        description="number of parameters that are set to zero for the set's other terms and still stored"
    )
    bytes_removed: Annotated[int, Meaning("bytes", "exact", formula="parameters_removed x bytes a value")] = Field(
        description="number of bytes that the file gets smaller by, in the dtype that most of its tensors are stored in"
    )
    uniform_leaves: list[Kind] = Field(
        default=[],
        description="kinds of the set's terms of which some can leave the file with --uniform: neurons and heads, "
        "where the config can state what is left; empty in reports of old versions",
    )


class SketchRound(Result):
    """Gain from sketching the model again: the set of the rounds so far beside one of a single round."""

    removed: Annotated[int, COUNT] = Field(
        description="number of terms that are removed at the end of a round of sketching"
    )
    measured: Annotated[Finite, ABLATED] = Field(
        description="damage of really removing the set of the rounds so far, mean over the prompts"
    )
    single_removed: Annotated[int, COUNT] = Field(
        description="number of terms of the smallest set of a single round that holds as many parameters as the rounds "
        "so far remove"
    )
    single_measured: Annotated[Finite, ABLATED] = Field(
        description="damage of really removing the set of a single round, mean over the prompts"
    )


class HeldOut(Result):
    """Effect of removing a set, on prompts that played no part in choosing it."""

    removed: Annotated[int, COUNT] = Field(description="number of terms that the set removes")
    share: ShareOfKind
    prompts: Annotated[int, Meaning("prompts", "exact")] = Field(
        description="number of held-out prompts that the set was run on: not all where both statements, on the share "
        "of prompts and on the mean, had failed for smaller sets"
    )
    mean: Annotated[Finite, ABLATED] = Field(
        description="mean damage of removing the set over the held-out prompts that it was run on"
    )
    percentile_90: Annotated[Finite, ABLATED] = Field(
        description="damage of removing the set that a tenth of the held-out prompts exceed"
    )
    exceeded: int = Field(
        description="number of held-out prompts whose damage is above the budget, of those that the set was run on"
    )
    share_exceeded: Annotated[Finite, Meaning("share of prompts", "measured")] = Field(
        description="share of held-out prompts whose damage is above the budget, of those that the set was run on"
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
        description="damage without the set's terms that at most a share --exceed of prompts exceed, with the report's "
        "confidence; null where the set was not run on all held-out prompts"
    )


class _Tested(WithReasons):
    """Test of nested sets on held-out prompts, which played no part in choosing the plan's set."""

    confidence: Annotated[Finite, CONFIDENCE] = Field(description="probability with which the guarantee holds")
    holdout_prompts: int = Field(description="number of prompts that were held out")
    holdout_sha256: str = Field(
        description="SHA-256 of the held-out prompts' own SHA-256 in hexadecimal, one a line, in their order"
    )
    method: str = Field(description="how the guarantee was tested")
    tested: list[int] = Field(
        description="sizes of the sets to be tested on held-out prompts, in this order, up to the plan's set: at most "
        "five (--effort quick three, thorough sixteen), about as far from each other"
    )
    removed: int = Field(
        description="number of terms of the guaranteed set, the last one that passed in the order of testing; 0 where "
        "the first one tested did not"
    )
    share: ShareOfKind


class Guarantee(_Tested):
    """Statement on the share of prompts whose damage is above the budget, tested on held-out prompts, which played
    no part in choosing the set."""

    budget: Annotated[Finite, _BUDGET] = Field(description="the largest damage allowed")
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
        description="largest share of prompts, drawn as the held-out ones were, that have a damage above the budget; "
        "true with the guarantee's confidence"
    )
    exceeded: int = Field(
        description="number of held-out prompts whose damage is above the budget without the guaranteed set; 0 where "
        "no set passed"
    )
    may_exceed: int | None = Field(
        default=None,
        description="most held-out prompts whose damage may be above the budget for a set to pass; null in a report of "
        "an earlier version",
    )
    saves: SetSize | None = Field(
        description="terms, parameters and bytes that a checkpoint without the guaranteed set saves; null where the "
        "set is empty, or no file can be written without it"
    )
    set: list[str] = Field(
        description="terms of the guaranteed set, as many as `removed`, which are the first of the plan's set"
    )

    @property
    def share_exceeding(self) -> str:
        """The guarantee in words: 'with 95% confidence: at most 5% of prompts'."""
        return f"with {exactly(self.confidence)}% confidence: at most {exactly(self.share_above_limit)}% of prompts"


class MeanGuarantee(_Tested):
    """Statement on the mean damage, tested on held-out prompts, which played no part in choosing the set."""

    budget: Annotated[Finite, _BUDGET] = Field(description="the largest mean damage allowed")
    most: Annotated[Finite, Meaning("the metric's", "given", formula="5 budget")] = Field(
        description="what one prompt's damage counts for in the mean, at most: a mean of damages without a bound could "
        "not be bounded from any number of prompts"
    )
    counted_for_less: int = Field(
        description="number of held-out prompts whose damage is larger than `most` and counts for no more in the mean; "
        "0 where no set passed"
    )
    mean: Annotated[Finite | None, ABLATED] = Field(
        description="mean damage of the guaranteed set on the held-out prompts, each counted in full; null where no "
        "set passed"
    )


_COSINE = Meaning(
    "-1 to 1",
    "measured",
    formula="<u, v> / (|u| |v|), u and v the pooled final hidden states of the model and of the ablated one",
    how="before any layer that the embedder has behind its pooling",
    signed=True,
)
_TURNED = "cosine between an embedder's pooled output and that without the set's terms"


class PooledCosine(WithReasons):
    """How far a set turns the pooled output of an embedder, a model that predicts neither tokens nor classes."""

    granularity: str = Field(description="kinds of the set's terms, as `granularity` of the plan has them")
    removed: Annotated[int, COUNT] = Field(
        description="number of terms that the set removes: the plan's set, or the guaranteed one"
    )
    pooling: str = Field(
        description="what an embedder makes of its final hidden states: as 1_Pooling/config.json states it, else their "
        "mean"
    )
    mean: Annotated[Finite, _COSINE] = Field(description=f"mean {_TURNED}, over the prompts that chose the set")
    lowest: Annotated[Finite, _COSINE] = Field(description=f"lowest {_TURNED}, over the prompts that chose the set")
    held_out_mean: Annotated[Finite | None, _COSINE] = Field(description=f"mean {_TURNED}, over the held-out prompts")
    held_out_lowest: Annotated[Finite | None, _COSINE] = Field(
        description=f"lowest {_TURNED}, over the held-out prompts"
    )


class Plan(WithReasons):
    """The largest set of terms of one kind, or of kinds that go together, within the budget, or the set of the
    size that --remove asks for."""

    granularity: str = Field(
        description="kind of the plan's terms: neuron, head, expert, ffn, attention or block; several with commas, "
        "such as neuron,head, where they go into one set"
    )
    budget: Annotated[Finite, _BUDGET] = Field(description="the largest damage allowed")
    remove: Annotated[Finite | None, Meaning("share, 0 to 1", "given", formula="--remove")] = Field(
        description="share of the parameters that the plan's set was to hold, whatever the damage; null: as much as "
        "the budget allows"
    )
    removed: Annotated[int, COUNT] = Field(description="number of terms that the set removes")
    of: Annotated[int, COUNT] = Field(
        description="number of terms of this kind, or of these kinds together, in the model"
    )
    share: Annotated[Finite, Meaning("share, 0 to 1", "exact", formula="removed / of")] = Field(
        description="share of all terms of its kind, or of its kinds together, that the set removes"
    )
    parameters: Annotated[
        int,
        Meaning(
            "parameters",
            "exact",
            how="a head counts with its share of all that the attention holds, also of keys and values, which leave "
            "with all heads that use them, and biases behind the heads, which stay; what blocks share counts in each",
        ),
    ] = Field(description="number of parameters that the removed terms hold")
    parameters_share: Annotated[Finite, Meaning("share, 0 to 1", "exact")] = Field(
        description="share of the parameters in `parameters_of` that the removed terms hold"
    )
    parameters_of: Literal["blocks", "all"] = Field(
        description="parameters that `parameters_share` is a share of: those of the blocks, or all of the model"
    )
    predicted: Annotated[Finite | None, _OF_SET] = Field(description="predicted damage of removing the set")
    measured: Annotated[Finite | None, ABLATED] = Field(
        description="damage of really removing the plan's set, mean over the prompts that chose it, with --repair of "
        "the repaired model; at most the budget, by that choice, without --remove"
    )
    uniform: bool = Field(
        description="whether every FFN loses as many neurons, and every attention as many key and value heads with the "
        "heads that use them (--uniform)"
    )
    rounds: list[SketchRound] = Field(
        description="gain from each of the rounds of --rounds over a single round; empty without --rounds"
    )
    saves: SetSize | None = Field(
        description="terms, parameters and bytes that a checkpoint without the plan's set saves; null where the set is "
        "empty, or no file can be written without it"
    )
    curve: list[CurvePoint]
    held_out: list[HeldOut] = Field(
        description="damage of the nested sets that were run on held-out prompts, from the smallest"
    )
    criteria: list[CriterionSet] = Field(
        default_factory=list,
        description="damage on the held-out prompts of sets that other criteria choose (--criteria), and of random "
        "ones, beside duat's own of as many parameters; empty without a chosen set or held-out prompts",
    )
    guarantee: Guarantee | None
    mean_guarantee: MeanGuarantee | None
    repair: SetRepair | None = Field(
        description="layers that --repair refits for the plan's set, and the effect; `held_out`, `guarantee` and "
        "`mean_guarantee` are then of the repaired model, `predicted` and `curve` of the set alone"
    )
    set: list[str] = Field(
        description="kind, block and index of the terms in the plan's set as block.3.head.1 (block.3 for a block), in "
        "the order of removal: a smaller set of the curve is the beginning of this one"
    )

    @property
    def remove_option(self) -> str | None:
        """The option that set the plan's size, such as '--remove 20%/all'; None where the budget set it."""
        if not self.remove:
            return None
        return f"--remove {100 * self.remove:g}%{'/all' if self.parameters_of == 'all' else ''}"
