"""The summary: means over blocks, and at most three sentences that the numbers support."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from duat_cli.results.base import Certificate, PromptFacts
from duat_cli.results.inspect import Block, Summary

MOST = 3


def summarise(blocks: Sequence[Block], certificate: Certificate, heads: int, prompts: Sequence[PromptFacts]) -> Summary:
    """Shares are those of the last block in the report."""
    last = blocks[-1].terms
    context = _mean(b.coupling.effective_context for b in blocks)
    structural = _mean(b.density.structural for b in blocks)
    values = {
        "linear_share": last.linear.share,
        "static_share": last.static.share,
        "dynamic_share": last.dynamic.share,
        "effective_context": context,
        "structural_density": structural,
    }
    reasons = {name: "no block has it" for name, value in values.items() if value is None}
    return Summary(**values, notable=_notable(blocks, certificate, heads, prompts), reasons=reasons)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _notable(
    blocks: Sequence[Block], certificate: Certificate, heads: int, prompts: Sequence[PromptFacts]
) -> list[str]:
    if not certificate.exact:
        return []  # no sentence stands on numbers that the certificate does not carry
    candidates = [
        _terms_sentence(blocks[-1]),
        _first_token(blocks),
        _few_heads(blocks, heads, prompts),
        _local(blocks, prompts),
    ]
    return [c for c in candidates if c is not None][:MOST]


def _terms_sentence(last: Block) -> str | None:
    shares = {
        "the linear path from the input": last.terms.linear.share,
        "biases": last.terms.static.share,
        "the nonlinear (UAT) terms": last.terms.dynamic.share,
    }
    known = {k: v for k, v in shares.items() if v is not None}
    if not known:
        return None
    name = max(known, key=lambda k: known[k])
    if known[name] <= 0.5:
        return f"no part makes most of block {last.index}'s output; the largest, {known[name]:.0%}, is {name}"
    return f"block {last.index}'s output is made mostly of {name}: a share of {known[name]:.0%}"


def _extreme(
    blocks: Sequence[Block], value: Callable[[Block], float | None], *, largest: bool
) -> tuple[Block, float] | None:
    known = [(b, v) for b in blocks if (v := value(b)) is not None]
    if not known:
        return None
    return (max if largest else min)(known, key=lambda pair: pair[1])


def _first_token(blocks: Sequence[Block]) -> str | None:
    found = _extreme(blocks, lambda b: b.coupling.first_token_share, largest=True)
    if found is None or found[1] < 0.5:
        return None
    weighted = found[0].coupling_weighted.first_token_share
    rest = "" if weighted is None else f" ({weighted:.0%} once weighted by what that token carries)"
    return f"block {found[0].index} couples most to the first token: {found[1]:.0%} of a row's energy on average{rest}"


def _few_heads(blocks: Sequence[Block], heads: int, prompts: Sequence[PromptFacts]) -> str | None:
    found = _extreme(blocks, lambda b: b.operator.effective_heads, largest=False)
    if found is None or heads < 2 or found[1] > 0.5 * heads or min(p.tokens for p in prompts) < heads:
        return None
    return f"block {found[0].index}'s attention acts like {found[1]:.1f} of its {heads} heads"


def _local(blocks: Sequence[Block], prompts: Sequence[PromptFacts]) -> str | None:
    tokens = statistics.fmean(p.tokens for p in prompts)
    found = _extreme(blocks, lambda b: b.coupling.effective_context, largest=False)
    if found is None or found[1] > 0.25 * tokens:
        return None
    return f"block {found[0].index} reads {found[1]:.1f} of {tokens:.0f} tokens in effect, the fewest"
