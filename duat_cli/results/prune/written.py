"""The checkpoint that `duat prune-bound --apply` wrote, in its report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import Finite, WithReasons
from duat_cli.results.meaning import Meaning
from duat_cli.text import plural

_PERPLEXITY = Meaning(
    "exp(nats a token)", "measured", formula="exp(sum of next-token losses / number of tokens that have a next one)"
)
_SECONDS = Meaning(
    "seconds a token",
    "measured",
    how="median of alternating runs of both, each prompt on its own, nothing cached; other work on the machine counts",
    checked=False,
)
_COUNT = Meaning("parameters", "exact")
_BYTES = Meaning("bytes", "exact", formula="of the tensors in the files")


class Written(WithReasons):
    """A checkpoint without a set of terms, read back, and compared with the model that it was made from."""

    granularity: str = Field(
        description="kinds of the terms that the written checkpoint lacks, as --granularity takes them"
    )
    terms: int = Field(description="number of terms that the written checkpoint lacks, zeroed ones included")
    repaired: bool = Field(description="whether layers of the written checkpoint were refitted (--repair)")
    removed_blocks: list[int] = Field(description="numbers of the blocks that left the written file, from 0")
    removed_neurons: int = Field(description="number of neurons of every FFN that left the written file")
    removed_groups: int = Field(
        description="number of key and value heads of every attention that left the written file, with the heads that "
        "use them"
    )
    zeroed: int = Field(description="number of removed terms that the written file still holds, as zeros")
    notes: list[str] = Field(
        description="why terms are zeroed and not removed in the written file, which tensors it does not carry over, "
        "and that means in its biases are rounded, one line each"
    )
    dtype: str = Field(description="dtype of most of the written weights")
    error: Annotated[Finite, Meaning("relative", "measured")] = Field(
        description="distance of the written checkpoint's output, read back, from that of the model in memory without "
        "the set, relative to the latter; on a short random input"
    )
    parameters_before: Annotated[int, _COUNT] = Field(
        description="number of parameters of the model before the removal"
    )
    parameters_after: Annotated[int, _COUNT] = Field(
        description="number of parameters of the written checkpoint, zeros counted"
    )
    bytes_before: Annotated[int, _BYTES] = Field(
        description="size of the model's tensors in the files that it was loaded from"
    )
    bytes_after: Annotated[int, _BYTES] = Field(description="size of the tensors in the written files")
    measured_on: Literal["held out", "chose the set"] = Field(
        description="which prompts the written checkpoint's damage, perplexity and time were measured on: those held "
        "out, or, without any, those that chose the set, on which it looks better than it is"
    )
    prompts: int = Field(description="number of prompts that the written checkpoint was measured on")
    tokens: int = Field(
        description="number of tokens that have a next one, in the prompts that the written checkpoint was measured "
        "on; among pictures, of the words that are predicted"
    )
    damage: Annotated[Finite | None, Meaning("the metric's", "measured", formula="protocol.meaning")] = Field(
        description="damage of the written checkpoint, read back, beside the model before the removal, mean over the "
        "prompts; null where it is not finite"
    )
    exceeded: int = Field(
        description="number of prompts under which the written checkpoint's damage is above the budget, or no number"
    )
    perplexity_before: Annotated[Finite | None, _PERPLEXITY] = Field(
        description="perplexity of the model before the removal; null of a model that predicts no next token"
    )
    perplexity_after: Annotated[Finite | None, _PERPLEXITY] = Field(
        description="perplexity of the written checkpoint, read back; null of a model that predicts no next token"
    )
    seconds_before: Annotated[Finite, _SECONDS] = Field(
        description="time that the model takes before the removal; of an encoder-decoder, its encoder alone"
    )
    seconds_after: Annotated[Finite, _SECONDS] = Field(
        description="time that the written checkpoint takes, read back; of an encoder-decoder, its encoder alone"
    )
    timed_runs: int = Field(
        description="number of timed runs of each model, the one before the removal and the written one, that the "
        "median is taken over"
    )
    timed_tokens: int = Field(description="number of tokens of one timed run")

    @property
    def gone(self) -> str:
        """What was removed and what zeroed, as '5 neurons a block removed, 2 terms zeroed and still stored'."""
        counts = (
            (len(self.removed_blocks), "block", " removed"),
            (self.removed_neurons, "neuron", " a block removed"),
            (self.removed_groups, "key and value head", " a block removed"),
            (self.zeroed, "term", " zeroed and still stored"),
        )
        return ", ".join(plural(count, noun) + became for count, noun, became in counts if count)
