"""The parts of one prediction, arranged: by token, and by block and token."""

from __future__ import annotations

from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute import named
from duat_cli.results.attribute import Attribution

SIGNED = numbers.signed(numbers.plain)


def title(one: Attribution, prompts: int) -> str:
    """Which prediction: the target, the position, and the prompt where there are several."""
    where = "" if one.position is None else f" at position {one.position}"
    return f"{named(one)}{where}" + (f" of prompt {one.prompt}" if prompts > 1 else "")


def computed(one: Attribution) -> list[float]:
    """The UAT terms by the token at which they were computed."""
    found = [0.0] * len(one.parts.tokens)
    for unit in one.parts.units:
        for token, value in enumerate(unit.tokens or ()):
            found[token] += value
    return found


def by_block(one: Attribution) -> list[list[float]]:
    """A row for the embeddings, then one for each block with its UAT terms; a column a token."""
    tokens = len(one.parts.tokens)
    rows = [[token.value for token in one.parts.tokens], *([0.0] * tokens for _ in one.parts.static.blocks)]
    for unit in one.parts.units:
        for token, value in enumerate(unit.tokens or ()):
            rows[unit.block + 1][token] += value
    return rows


def token(one: Attribution, position: int) -> str:
    """A token by its position and text."""
    texts = one.parts.tokens
    return f"{position} '{texts[position].text}'" if position < len(texts) else str(position)
