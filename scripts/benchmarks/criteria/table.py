"""A comparison as rows of a table: mean damage by share, who is best, and by how much with a paired interval."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.criteria.comparison import BLOCKS, OURS, REPAIRED, SHARES, Comparison, Outcome, best
from duat_cli.statistics.bootstrap import paired_interval

CONFIDENCE = 0.95
ALWAYS = "Nowhere does another method do less damage than duat."


@dataclass(frozen=True)
class Ratio:
    """Mean damage over that of another method, and the ends of a paired interval of the difference over the same."""

    value: float
    low: float
    high: float
    other: Outcome

    @classmethod
    def of(cls, one: Outcome, other: Outcome) -> Ratio:
        value = one.damage / other.damage
        interval = paired_interval((one.judged.damage - other.judged.damage).tolist(), CONFIDENCE)
        if interval is None:  # sets that do the same to every window
            return cls(value, value, value, other)
        return cls(value, 1 + interval.low / other.damage, 1 + interval.high / other.damage, other)

    @property
    def between(self) -> str:
        low, high = (f"{end:.2f}" if end < 10 else f"{end:.0f}" for end in (self.low, self.high))
        return f"{low} to {high}"


def methods(outcomes: Sequence[Outcome]) -> list[str]:
    """In the order in which they came, duat's last, and last of all its repair."""
    names = list(dict.fromkeys(one.method for one in outcomes))
    return sorted(names, key=lambda name: (name.startswith(OURS), name == REPAIRED))


def markdown(found: Comparison) -> str:
    """The tables of one model. Bold: of the methods without repair the best, and those that the best does not beat (the
    paired interval of the difference of damage holds 0). In brackets that interval, over the best one's damage."""
    language = found.dense.loss is not None
    unit = "KL, nats a token" if language else "relative change of the hidden states"
    unit += f"{', and perplexity' if language else ''}, in brackets the interval of the damage over the best one's"
    heads = [f"{100 * share:g} % removed" for share in SHARES]
    lines = [*textwrap.wrap(f"{found.name}, nothing in the place of what is removed: {unit}", 120), ""]
    lines += _rows(found.bare(), SHARES, ["method", *heads])
    lines += ["", f"{found.name}, means in its place:", ""]
    lines += _rows(found.filled(), SHARES, ["method, with biases", *heads])
    lines += ["", f"{found.name}, damage of duat over that of the best other method:", ""]
    lines += [f"| duat | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for what, ratios in contests(found).items():
        cells = (f"{one.value:.2f} ({one.between}), {label(one.other)}" for one in ratios)
        lines.append(f"| {what} | {' | '.join(cells)} |")
    if language:
        lines += ["", f"Perplexity of the whole model there: {found.dense.perplexity:.2f}."]
    lines += ["", f"{found.name}, whole blocks:", ""]
    lines += _rows(found.blocks, BLOCKS, ["method", *(f"{n} of the blocks" for n in BLOCKS)])
    return "\n".join(lines)


def lost(found: Sequence[Comparison]) -> str:
    """A sentence on the cells in which another method does less damage than duat's sets without repair."""
    cells = []
    for one in found:
        ratios = [*_ratios(one.bare(), OURS, one.bare()), *_ratios(one.filled(), OURS, one.filled())]
        for ratio in (*ratios, *_ratios(one.blocks, OURS, one.blocks, BLOCKS)):
            size = (
                f"{100 * ratio.other.wanted:g} %" if ratio.other.wanted in SHARES else f"{ratio.other.wanted:g} blocks"
            )
            size += ", means in its place" if ratio.other.means else ""
            cells += [f"{one.name} without {size} ({ratio.between})"] if ratio.low > 1 else []
    return f"Another method does less damage than duat here: {'; '.join(cells)}." if cells else ALWAYS


def label(one: Outcome) -> str:
    """Of another method."""
    return f"{one.method}{' with means' if one.means else ''}"


def contests(found: Comparison) -> dict[str, list[Ratio]]:
    """What of duat is compared with the best of which others, at every share."""
    every = found.parts
    return {
        "zeros, against others with zeros": _ratios(found.bare(), OURS, found.bare()),
        "means, against others with means": _ratios(found.filled(), OURS, found.filled()),
        "means, against all others": _ratios(found.filled(), OURS, every),
        "repaired, against all others": _ratios(found.filled(), REPAIRED, every),
    }


def _ratios(
    mine: Sequence[Outcome], method: str, others: Sequence[Outcome], every: Sequence[float] = SHARES
) -> list[Ratio]:
    found = []
    for share in every:
        own = best(mine, method, share)
        if own is None:
            continue
        rest = [one for one in others if one.wanted == share and not one.method.startswith(OURS)]
        found.append(Ratio.of(own, min(rest, key=lambda one: one.damage)))
    return found


def _rows(outcomes: Sequence[Outcome], wanted: Sequence[float], head: Sequence[str]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    leading = {share: _best_bare(outcomes, share) for share in wanted}
    for method in methods(outcomes):
        cells = [_cell(best(outcomes, method, share), leading[share]) for share in wanted]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def _best_bare(outcomes: Sequence[Outcome], share: float) -> Outcome | None:
    """Of the methods without repair."""
    there = [one for one in outcomes if one.wanted == share and one.method != REPAIRED]
    return min(there, key=lambda one: one.damage, default=None)


def _cell(one: Outcome | None, leading: Outcome | None) -> str:
    if one is None or leading is None:
        return "-"
    ratio = Ratio.of(one, leading)
    text = f"{one.damage:.3g}" if one.damage < 1 else f"{one.damage:.2f}"
    text = f"**{text}**" if ratio.low <= 1 and one.method != REPAIRED else text
    text = text if one.judged.loss is None else f"{text}, {one.judged.perplexity:.1f}"
    return text if one is leading else f"{text} ({ratio.between})"
