"""Results of `duat compare --patch`: one prompt's dynamic parameters put into another's pass."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from duat_cli.kinds import Patched
from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.meaning import Meaning

_D = "D = logit of token_b - logit of token_a"
_EFFECT = f"sum over pairs of D(a with b's) - D(a), over that of D(b) - D(a); {_D}"
_LOGITS = Meaning("logits", "measured", formula=_D, signed=True)


class PatchEffect(WithReasons):
    """How far a part of b, put into a's pass, moves a's prediction to b's; everything behind it runs for real."""

    effect: Annotated[
        Finite | None, Meaning("share", "measured", formula=_EFFECT, source="activation patching", signed=True)
    ] = Field(description="share of the difference in logits that it makes: 0 nothing moves, 1 the prediction is b's")
    null: Annotated[
        Finite | None,
        Meaning("share", "measured", formula="the same with b of the next pair that is neither text", signed=True),
    ] = Field(
        description="the same with the part of a third prompt: what any other would move; null where a pair has none"
    )
    kl: Annotated[
        Finite | None,
        Meaning(
            "share",
            "measured",
            formula="1 - sum over pairs of KL(b || a with b's) / sum of KL(b || a), of the prediction",
            signed=True,
        ),
    ] = Field(description="share of the divergence from b's distribution that it takes away; below 0 it adds to it")


class HeadPatch(PatchEffect):
    """Effect of b's H in one head."""

    head: int = Field(description="number of the head, from 0")


class TokenPatch(PatchEffect):
    """Effect of b's hidden state at one token in front of a block."""

    token: int = Field(description="its place in the prompt, from 0")
    text: str = Field(description="of the first pair's first prompt")


class BlockPatch(Result):
    """Effects of b's parts in one block, or in all blocks at once."""

    index: int | None = Field(description="number of the block, from 0; null: all that were asked for")
    H: PatchEffect | None = Field(default=None, description="its attention weights are b's; with --patch blocks")
    norms: PatchEffect | None = Field(default=None, description="the scales of its norms are b's")
    ffn: PatchEffect | None = Field(default=None, description="what its FFN gives is b's")
    together: PatchEffect | None = Field(default=None, description="the three of them are b's")
    heads: list[HeadPatch] = Field(default=[], description="H of one head alone; with --patch heads")
    tokens: list[TokenPatch] = Field(default=[], description="the stream of one token alone; with --patch tokens")


class PatchedPair(WithReasons):
    """Predictions of the two prompts of a pair."""

    a: int = Field(description="number of the first prompt, from 0")
    b: int = Field(description="number of the second prompt")
    token_a: str = Field(
        description="the next token or class whose probability falls most from a to b, or the one asked for by "
        "--against"
    )
    token_b: str = Field(
        description="the next token or class whose probability rises most from a to b, or the one asked for by --target"
    )
    given: bool = Field(default=False, description="the two tokens were asked for")
    before: Annotated[Finite | None, _LOGITS] = Field(description="D of a")
    after: Annotated[Finite | None, _LOGITS] = Field(description="D of b")
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="KL(b || a) of the prediction")] = Field(
        description="divergence of what a predicts from what b predicts"
    )


class Patching(Result):
    """Effects of b's dynamic parameters in a's pass."""

    what: Patched = Field(description="which parts are b's, one at a time")
    pairs: list[PatchedPair]
    blocks: list[BlockPatch]
    whole: BlockPatch | None = Field(default=None, description="all blocks at once; with --patch blocks")
    own_error: Annotated[
        Finite,
        Meaning(
            "relative",
            "measured",
            formula="max over pairs of |logits with a's own parts - a's logits| / |a's logits|; with --patch tokens of "
            "|logits with all tokens of b - b's logits| / |b's logits|",
        ),
    ] = Field(description="relative error of the logits where the outcome is known: rounding alone")
    tolerance: Annotated[Finite, Meaning("relative", "given")] = Field(description="the largest that passes")
    holds: bool = Field(description="own_error is at most the tolerance")
