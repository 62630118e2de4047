"""What a prediction and a token are called in the pictures of `attribute`."""

from __future__ import annotations

from duat_cli.report.tables.attribute.words import named
from duat_cli.results.attribute import Attribution


def title(one: Attribution, prompts: int) -> str:
    """Which prediction: the target, the position, and the prompt where there are several."""
    where = "" if one.position is None else f" at position {one.position}"
    return f"{named(one)}{where}" + (f" of prompt {one.prompt}" if prompts > 1 else "")


def token(one: Attribution, position: int) -> str:
    """A token by its position and text."""
    texts = one.parts.tokens
    return f"{position} '{texts[position].text}'" if position < len(texts) else str(position)
