"""A comparison as rows of a table: mean damage by share, who is best, and by how much with a paired interval."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.criteria.comparison import BLOCKS, OURS, REPAIRED, SHARES, Comparison, Outcome
from duat_cli.statistics.bootstrap import paired_interval

CONFIDENCE = 0.95


def methods(outcomes: Sequence[Outcome]) -> list[str]:
    """In the order in which they came, duat's last."""
    names = list(dict.fromkeys(one.method for one in outcomes))
    return sorted(names, key=lambda name: name.startswith(OURS))


def markdown(found: Comparison) -> str:
    """The tables of one model; bold: of the methods without repair the best, and those that the best does not beat (the
    paired interval of the difference of damage holds 0)."""
    language = found.dense.loss is not None
    unit = "KL, nats a token" if language else "relative change of the hidden states"
    heads = [f"{100 * share:g} % removed" for share in SHARES]
    lines = [f"{found.name}: {unit}{', and perplexity' if language else ''}", ""]
    lines += _rows(found, found.parts, SHARES, ["method", *heads])
    if language:
        lines += ["", f"Perplexity of the whole model there: {found.dense.perplexity:.2f}."]
    lines += ["", *_rows(found, found.blocks, BLOCKS, ["method", *(f"{n} of the blocks" for n in BLOCKS)])]
    return "\n".join(lines)


def _rows(found: Comparison, outcomes: Sequence[Outcome], wanted: Sequence[float], head: Sequence[str]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    marked = {share: _unbeaten(found, outcomes, share) for share in wanted}
    for method in methods(outcomes):
        cells = [_cell(found.best(outcomes, method, share), method in marked[share]) for share in wanted]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def _cell(one: Outcome | None, bold: bool) -> str:
    if one is None:
        return "-"
    text = f"{one.damage:.3g}" if one.damage < 1 else f"{one.damage:.2f}"
    text = f"**{text}**" if bold else text
    return text if one.judged.loss is None else f"{text}, {one.judged.perplexity:.1f}"


def _unbeaten(found: Comparison, outcomes: Sequence[Outcome], share: float) -> set[str]:
    """Of the methods without repair."""
    bare = [one for name in methods(outcomes) if name != REPAIRED and (one := found.best(outcomes, name, share))]
    best = min(bare, key=lambda one: one.damage, default=None)
    return {one.method for one in bare if best is not None and not _worse(one, best)}


def _worse(one: Outcome, best: Outcome) -> bool:
    interval = paired_interval((one.judged.damage - best.judged.damage).tolist(), CONFIDENCE)
    return interval is not None and interval.low > 0


def ratio(found: Comparison, outcomes: Sequence[Outcome], mine: str, share: float) -> tuple[float, float, float, str]:
    """Damage of `mine` over that of the best method that is not duat's, the ends of a paired interval of the
    difference over the same, and that method's name."""
    own = found.best(outcomes, mine, share)
    others = [found.best(outcomes, name, share) for name in methods(outcomes) if not name.startswith(OURS)]
    best = min((one for one in others if one is not None), key=lambda one: one.damage)
    assert own is not None
    interval = paired_interval((own.judged.damage - best.judged.damage).tolist(), CONFIDENCE)
    assert interval is not None
    low, high = (1 + end / best.damage for end in (interval.low, interval.high))
    return own.damage / best.damage, low, high, f"{best.method}, {best.variant}".rstrip(", ")
