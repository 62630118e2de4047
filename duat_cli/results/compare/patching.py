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
    ] = Field(
        description="share of the pairs' difference in logits that the patched part makes: 0 where nothing moves, 1 "
        "where the prediction becomes the second prompt's"
    )
    null: Annotated[
        Finite | None,
        Meaning("share", "measured", formula=f"{_EFFECT}; b's part of the next pair with neither text", signed=True),
    ] = Field(
        description="share of the pairs' difference in logits that the part of a third prompt makes: what any other "
        "would move; null where a pair has no third prompt"
    )
    kl: Annotated[
        Finite | None,
        Meaning(
            "share",
            "measured",
            formula="1 - sum over pairs of KL(b || a with b's) / sum of KL(b || a), of the prediction",
            signed=True,
        ),
    ] = Field(
        description="share of the divergence from the second prompt's prediction that the patched part takes away; "
        "below 0 it adds to it"
    )


class HeadPatch(PatchEffect):
    """Effect of b's H in one head."""

    head: int = Field(description="number of the head, from 0")


class TokenPatch(PatchEffect):
    """Effect of b's hidden state at one token in front of a block."""

    token: int = Field(description="place of the patched token in the prompt, from 0")
    text: str = Field(description="text of the patched token in the first prompt of the first pair")


class BlockPatch(Result):
    """Effects of parts of the second prompt, b, put into the first prompt's pass in each block."""

    index: int | None = Field(
        description="number of the block that is patched, from 0; null: all that were asked for at once"
    )
    H: PatchEffect | None = Field(
        default=None,
        description="effect of the second prompt's attention weights in place of the first's; with --patch blocks",
    )
    norms: PatchEffect | None = Field(
        default=None,
        description="effect of the second prompt's norm scales in place of the first's; with --patch blocks",
    )
    ffn: PatchEffect | None = Field(
        default=None,
        description="effect of the second prompt's FFN output in place of the first's; with --patch blocks",
    )
    cross: PatchEffect | None = Field(
        default=None,
        description="effect of what the second prompt's cross-attention gives in place of the first's, its weights and "
        "the encoder's states together; with --patch blocks, in a decoder",
    )
    together: PatchEffect | None = Field(
        default=None,
        description="effect of the second prompt's attention weights, norm scales, FFN output and, in a decoder, of "
        "what cross-attention gives, all in place of the first's; with --patch blocks",
    )
    heads: list[HeadPatch] = Field(
        default=[],
        description="effects of the second prompt's attention weights of each head, one at a time, in place of the "
        "first's; with --patch heads",
    )
    tokens: list[TokenPatch] = Field(
        default=[],
        description="effects of the second prompt's stream at each token, one at a time, in place of the first's; "
        "with --patch tokens",
    )


class PatchedPair(WithReasons):
    """Predictions of the two prompts of a pair."""

    a: int = Field(description="number of the first prompt, from 0")
    b: int = Field(description="number of the second prompt, from 0")
    token_a: str = Field(
        description="the next token or class whose probability falls most from a to b, or the one asked for by "
        "--against"
    )
    token_b: str = Field(
        description="the next token or class whose probability rises most from a to b, or the one asked for by --target"
    )
    given: bool = Field(default=False, description="whether the two tokens were asked for, by --target and --against")
    before: Annotated[Finite | None, _LOGITS] = Field(description="difference in logits D behind a, the first prompt")
    after: Annotated[Finite | None, _LOGITS] = Field(description="difference in logits D behind b, the second prompt")
    kl: Annotated[Finite | None, Meaning("nats", "exact", formula="KL(b || a) of the prediction")] = Field(
        description="divergence of what a, the first prompt, predicts from what b, the second, predicts"
    )


class Patching(Result):
    """Effects of b's dynamic parameters in a's pass."""

    what: Patched = Field(
        description="which parts of the second prompt are put into the first prompt's pass, one at a time"
    )
    pairs: list[PatchedPair]
    blocks: list[BlockPatch]
    whole: BlockPatch | None = Field(
        default=None, description="effects of the second prompt's parts in all blocks at once; with --patch blocks"
    )
    own_error: Annotated[
        Finite,
        Meaning(
            "relative",
            "measured",
            formula="max over pairs of |logits with a's own parts - a's logits| / |a's logits|; with --patch tokens of "
            "|logits with all tokens of b - b's logits| / |b's logits|",
        ),
    ] = Field(
        description="relative error of patched logits where the outcome is known, largest over pairs: rounding alone"
    )
    tolerance: Annotated[Finite, Meaning("relative", "given")] = Field(description="largest `own_error` that passes")
    holds: bool = Field(description="whether `own_error` is at most the tolerance")
