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

    granularity: str = Field(description="the kinds of the terms that it lacks, as --granularity takes them")
    terms: int = Field(description="how many terms it lacks")
    repaired: bool = Field(description="whether layers were refitted")
    removed_blocks: list[int] = Field(description="blocks that left the file")
    removed_neurons: int = Field(description="neurons of every FFN that left the file")
    removed_groups: int = Field(
        description="key and value heads of every attention that left the file, with the heads that use them"
    )
    zeroed: int = Field(description="terms that are still stored, as zeros")
    notes: list[str] = Field(description="why terms are zeroed and not removed, one line each")
    dtype: str = Field(description="of the written weights")
    error: Annotated[Finite, Meaning("relative", "measured")] = Field(
        description="distance of its output, read back, from that of the model in memory without the set; on a short "
        "random input"
    )
    parameters_before: Annotated[int, _COUNT] = Field(description="of the model as it was")
    parameters_after: Annotated[int, _COUNT] = Field(description="of the written one, zeros counted")
    bytes_before: Annotated[int, _BYTES] = Field(description="of the model as it was")
    bytes_after: Annotated[int, _BYTES] = Field(description="of the written one")
    measured_on: Literal["held out", "chose the set"] = Field(
        description="which prompts damage, perplexity and time were measured on: those held out, or, without any, "
        "those that chose the set, on which it looks better than it is"
    )
    prompts: int = Field(description="how many prompts these are")
    tokens: int = Field(
        description="tokens of these prompts that have a next one; among pictures, words that are predicted"
    )
    damage: Annotated[Finite | None, Meaning("the metric's", "measured", formula="protocol.meaning")] = Field(
        description="of the written one, read back, beside the model as it was"
    )
    exceeded: int = Field(description="prompts whose damage is above the budget, or no number")
    perplexity_before: Annotated[Finite | None, _PERPLEXITY] = Field(description="of the model as it was")
    perplexity_after: Annotated[Finite | None, _PERPLEXITY] = Field(description="of the written one, read back")
    seconds_before: Annotated[Finite, _SECONDS] = Field(description="of the model as it was")
    seconds_after: Annotated[Finite, _SECONDS] = Field(description="of the written one, read back")
    timed_runs: int = Field(description="runs of each that the median is taken over")
    timed_tokens: int = Field(description="tokens of one run")

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
