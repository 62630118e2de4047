"""The summary: means over blocks, and at most three sentences that the numbers support.

A statistic of W' is mentioned where it differs enough from the nearer of its nulls.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from duat_cli.analysis.inspect.assemble import NO_ENCODER
from duat_cli.results.base import Certificate
from duat_cli.results.inspect import Block, Summary

MOST = 3
SMALLEST_OWN = 0.05  # smallest share that is worth a sentence
FEWEST_HEADS, LEAST_SHARE, LEAST_RATIO = 0.5, 0.25, 2.0  # differences from the nearer null that are worth a sentence


def summarise(blocks: Sequence[Block], certificate: Certificate, heads: int | None) -> Summary:
    """The summary of a report. Its shares are those of the last block in the report. heads: number of heads of every
    block; None where blocks differ."""
    last = blocks[-1].terms
    context = _mean(b.coupling.effective_context for b in blocks)
    structural = _mean(b.density.structural for b in blocks)
    return Summary.explained(
        "no block has it",
        {"encoder_share": NO_ENCODER},
        linear_share=last.linear.share,
        static_share=last.static.share,
        dynamic_share=last.dynamic.share,
        effective_context=context,
        structural_density=structural,
        encoder_share=None if last.encoder is None else last.encoder.share,
        notable=_notable(blocks, certificate, heads),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _notable(blocks: Sequence[Block], certificate: Certificate, heads: int | None) -> list[str]:
    if not certificate.exact:
        return []  # no sentence without an exact certificate
    candidates = [_own_terms(blocks), _heads(blocks, heads), _first_token(blocks), _local(blocks)]
    return [c for c in candidates if c is not None][:MOST]


def _own_terms(blocks: Sequence[Block]) -> str | None:
    shares = [(share, block.index) for block in blocks if (share := block.terms.own.token_median) is not None]
    if not shares or max(shares)[0] < SMALLEST_OWN:
        return None
    (low, least), (high, most) = min(shares), max(shares)
    text = f"block {most}'s own UAT term makes {_percent(high)} of its output at a typical token"
    return text if least == most else f"{text}, the most; block {least}'s {_percent(low)}"


def _percent(share: float) -> str:
    return f"{round(share, 2) + 0.0:.0%}"  # + 0.0 avoids -0%


@dataclass(frozen=True)
class _Gap:
    """A block's value, and the null that is nearer to it."""

    block: Block
    value: float
    null: float
    of: str
    """Words that name the null; empty for the re-initialised one, which the table shows."""


def _gaps(blocks: Sequence[Block], path: str) -> list[_Gap]:
    """The gaps of those blocks whose value at 'group.field' lies outside the range of its nulls."""
    read, found = attrgetter(path), []
    for block in blocks:
        value = read(block)
        named = ((block.null.reinitialised, ""), (block.null.uniform, " of uniform attention"))
        nulls = [(null, of) for n, of in named if n and (null := read(n)) is not None]
        if value is not None and nulls and not min(nulls)[0] <= value <= max(nulls)[0]:
            found.append(_Gap(block, value, *min(nulls, key=lambda null: abs(null[0] - value))))
    return found


def _heads(blocks: Sequence[Block], heads: int | None) -> str | None:
    gap = max(_gaps(blocks, "operator.effective_heads"), key=lambda g: abs(g.value - g.null), default=None)
    if gap is None or abs(gap.value - gap.null) < FEWEST_HEADS:
        return None
    name = f"block {gap.block.index}'s attention"
    # a mixer without softmax, a gate on channels or values of several tokens have other products than the named heads
    same = gap.block.operator.kronecker_products in (None, heads)
    of = f" of its {heads}" if heads is not None and same and max(gap.value, gap.null) <= heads else ""
    return f"{name} acts like {gap.value:.1f}{of} heads, its null{gap.of} like {gap.null:.1f}"


def _first_token(blocks: Sequence[Block]) -> str | None:
    gap = max(_gaps(blocks, "coupling.first_token_share"), key=lambda g: g.value - g.null, default=None)
    if gap is None or gap.value - gap.null < LEAST_SHARE:
        return None
    weighted = gap.block.coupling_weighted.first_token_share
    rest = "" if weighted is None else f" ({weighted:.0%} once weighted by what that token carries)"
    return (
        f"block {gap.block.index} couples to the first token by {gap.value:.0%} of a row's energy on average{rest}, "
        f"its null{gap.of} by {gap.null:.0%}"
    )


def _local(blocks: Sequence[Block]) -> str | None:
    gap = max(_gaps(blocks, "coupling.effective_context"), key=lambda g: g.null / g.value, default=None)
    if gap is None or gap.null < LEAST_RATIO * gap.value:
        return None
    return f"block {gap.block.index} reads {gap.value:.1f} tokens in effect, its null{gap.of} {gap.null:.1f}"
