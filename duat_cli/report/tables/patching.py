"""Results of `duat compare --patch` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import BLOCK, Column, Labels, titled, titled_named
from duat_cli.report.tables.page import Page, cut
from duat_cli.results.compare.patching import BlockPatch, HeadPatch, PatchedPair, Patching, TokenPatch
from duat_cli.text import plural

_SHOWN_PAIRS = 8
_SHOWN = 16  # how many heads or tokens are shown, those with the largest effects
_SHARE = numbers.signed(numbers.percent)
PATCH_COLUMNS = [
    Column(("H", "%"), "H.effect", _SHARE, ("H: where tokens look", "%")),
    Column(("norms", "%"), "norms.effect", _SHARE, ("scales of norms", "%")),
    Column(("FFN", "%"), "ffn.effect", _SHARE, ("what the FFN gives", "%")),
    Column(("all", "three", "%"), "together.effect", _SHARE, ("all three", "%")),
    Column(("null", "H", "%"), "H.null", _SHARE, ("null: H of a third prompt", "%")),
    Column(("null", "norms", "%"), "norms.null", _SHARE, ("null: norms of a third prompt", "%")),
    Column(("null", "FFN", "%"), "ffn.null", _SHARE, ("null: FFN of a third prompt", "%")),
    Column(("null", "three", "%"), "together.null", _SHARE, ("null: all three of a third prompt", "%")),
]
DECODER_COLUMNS = [
    *PATCH_COLUMNS[:3],
    Column(("cross", "%"), "cross.effect", _SHARE, ("what cross-attention gives", "%")),
    Column(("all", "four", "%"), "together.effect", _SHARE, ("all four", "%")),
    *PATCH_COLUMNS[4:7],
    Column(("null", "cross", "%"), "cross.null", _SHARE, ("null: cross-attention of a third prompt", "%")),
    Column(("null", "four", "%"), "together.null", _SHARE, ("null: all four of a third prompt", "%")),
]
EFFECT_COLUMNS = [
    Column(("effect", "%"), "effect", _SHARE),
    Column(("null", "%"), "null", _SHARE, ("null: of a third prompt", "%")),
    Column(("KL", "taken", "%"), "kl", _SHARE, ("KL that it takes away", "%")),
]
TABLES = {
    "patched.blocks[].": [*PATCH_COLUMNS, *DECODER_COLUMNS],
    "patched.whole.": [*PATCH_COLUMNS, *DECODER_COLUMNS],
    "patched.blocks[].heads[].": EFFECT_COLUMNS,
    "patched.blocks[].tokens[].": EFFECT_COLUMNS,
}
WHAT = {
    "blocks": "parts of one block are b's",
    "heads": "the attention weights of one head are b's",
    "tokens": "the stream of one token in front of a block is b's",
}
WORDS = {"heads": "head", "tokens": "token"}
_LEGEND = (
    "Effect: share of the difference in logits, from a's prediction (0) to b's (100 %); what follows the part runs for "
    "real. Effects need not add up.",
    "null: the same with the part of a third prompt, the second of another pair.",
)
_BLOCK = Labels(("block",), lambda row: "all" if row.index is None else row.index)


def patches(found: Patching, page: Page) -> list[RenderableType]:
    """Tables on what the prompts predict and what moves the prediction, and the check."""
    title = f"What moves the prediction: a's pass, in which {WHAT[found.what]}"
    if found.what == "blocks":
        rows = [*found.blocks, *([] if found.whole is None else [found.whole])]
        columns = columns_of(found)
        table = titled(title, rows, _BLOCK, columns, page, *_LEGEND)
        table += facts.without_value(found.blocks, BLOCK, columns)
    else:
        table = _largest(found, title, page)
    return [
        *table,
        *facts.section("the difference in logits", predictions(found)),
        facts.held(check(found), found.holds),
    ]


def columns_of(found: Patching) -> list[Column]:
    """The columns of a table by block: with cross-attention where a decoder is read."""
    return DECODER_COLUMNS if any(block.cross is not None for block in found.blocks) else PATCH_COLUMNS


def predictions(found: Patching) -> list[str]:
    """Lines on the predictions of the first pairs, the number of others, and the number of pairs in which the
    difference in logits of tokens that were asked for falls from a to b."""
    lines = list(map(_prediction, found.pairs[:_SHOWN_PAIRS]))
    more = len(found.pairs) - _SHOWN_PAIRS
    if more > 0:
        lines.append(f"and {plural(more, 'more pair')}, see --json")
    falling = sum(pair.given and (pair.after or 0.0) < (pair.before or 0.0) for pair in found.pairs)
    if falling:
        lines.append(f"the difference falls from a to b in {falling} of {plural(len(found.pairs), 'pair')}")
    return lines


def _prediction(pair: PatchedPair) -> str:
    """A line on a pair of prompts: the two tokens whose probabilities differ most, or those asked for, and the
    differences of their logits."""
    prompts, a, b = f"a, prompt {pair.a}, to b, prompt {pair.b}", cut(pair.token_a), cut(pair.token_b)
    ends = f"{numbers.SIGNED(pair.before)} behind a, {numbers.SIGNED(pair.after)} behind b"
    if pair.given:
        return f"{prompts}: the logit of '{b}' less that of '{a}' is {ends}"
    if pair.before == pair.after == 0.0:  # both tokens are the same
        return f"{prompts}: the predictions are alike"
    return (
        f"{prompts}: '{b}' gains most probability, '{a}' loses most; the logit of the first less that of the second is "
        f"{ends}"
    )


def _named(block: BlockPatch, effect: HeadPatch | TokenPatch) -> str:
    if isinstance(effect, TokenPatch):
        return f"block {block.index}, token {effect.token} '{effect.text}'"
    return f"{block.index}.{effect.head}"


def _within(block: BlockPatch) -> list[HeadPatch | TokenPatch]:
    return [*block.heads, *block.tokens]


def _largest(found: Patching, title: str, page: Page) -> list[RenderableType]:
    every = [(block, effect) for block in found.blocks for effect in _within(block)]
    leading = sorted(every, key=lambda one: -abs(one[1].effect or 0.0))[:_SHOWN]
    kept = every if page.every else [one for one in leading if one[1].effect != 0] or leading[:1]
    rows = [(_named(*one), one[1]) for one in kept]
    left = len(every) - len(kept)
    more = [f"and {plural(left, 'smaller one')}, see --json."] if left else []
    table = titled_named(title, rows, EFFECT_COLUMNS, page, *more, *_LEGEND, head=WORDS[found.what])
    return [*table, *_reasons(kept)]


def _reasons(kept: Sequence[tuple[BlockPatch, HeadPatch | TokenPatch]]) -> list[RenderableType]:
    """Section on why numbers are missing, with each reason once."""
    found = dict.fromkeys((name, why) for _, effect in kept for name, why in effect.reasons.items())
    return facts.section(f"no value ({numbers.ABSENT})", [f"{name}: {why}" for name, why in found])


def check(found: Patching) -> str:
    """A line on the check of a patch whose result is known, with its error."""
    what = "all tokens of b give b's logits" if found.what == "tokens" else "a's own parts give back a's logits"
    return f"{what}: relative error {numbers.error(found.own_error)}, tolerance {found.tolerance:.0e}"
