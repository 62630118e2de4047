"""Sentences on what a change of weights does to prompts, for a reader to see first; each rests on reported numbers."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.analysis.lora.findings import Findings
from duat_cli.analysis.lora.weights.notable import percent
from duat_cli.results.lora import BlockChange, PromptChange


def notable(found: Findings) -> list[str]:
    """Sentences on where the change acts most and through what, on which prompts, and on what it does to the loss."""
    lines = [*most_moved(found.blocks), *_most_and_least(found.order.first, found.order.last)]
    whole, answers = found.whole, found.answers
    if whole.kl:
        lines.append(f"KL(base || tuned) of the prediction {whole.kl:.3g} nats, the mean over the prompts")
    for what, means in (("the loss", whole), ("the loss of the model's own messages", answers)):
        if means.loss:
            between = _loss_between(what, means.loss, means.loss_interval)
            lines.append(f"{between}; it fell on {means.better} of {means.scored}")
    return lines


def most_moved(blocks: Sequence[BlockChange]) -> list[str]:
    """A sentence on which W' changed most, and through what; none where no W' changed."""
    changed = [b for b in blocks if b.operator.relative_change]
    known = [b for b in changed if b.operator.routing is not None and b.operator.weights is not None]
    if not known:
        return []
    top = max(known, key=lambda b: b.operator.relative_change or 0.0)
    routing = [b.operator.routing or 0.0 for b in known]
    weights = [b.operator.weights or 0.0 for b in known]
    more = sum(r > w for r, w in zip(routing, weights, strict=True))
    ffn = [b.terms.ffn for b in blocks if b.terms.ffn is not None]
    added = f"; what FFNs add changed by {_between(ffn)} %" if ffn else ""
    return [
        f"W' of block {top.index} changed most, by {100 * (top.operator.relative_change or 0):.3g} %; routing (what "
        f"attention looks at) changed it by {_between(routing)} % a block, weights (what it carries) by "
        f"{_between(weights)} %, routing more in {more} of {len(known)}{added}"
    ]


def _between(shares: Sequence[float]) -> str:
    least, most = percent(min(shares)), percent(max(shares))
    return least if least == most else f"{least} to {most}"


def _most_and_least(most: PromptChange | None, least: PromptChange | None) -> list[str]:
    """A sentence on the prompts whose predictions moved most and least."""
    if most is None or least is None or most is least or not most.kl:
        return []
    return [f"prompt {most.prompt} moved most (KL {most.kl:.3g} nats), prompt {least.prompt} least ({least.kl:.3g})"]


def _loss_between(what: str, change: float, interval: tuple[float, float] | None) -> str:
    """A sentence on how far the loss moved, and whether that is more than chance."""
    said = f"{what} {'fell' if change < 0 else 'rose'} by {abs(change):.3g}"
    said += " nats a token, the mean over the prompts"
    if interval is None:
        return f"{said}, too few to say whether it is more than chance"
    low, high = interval
    chance = ", not told apart from no change" if low <= 0 <= high else ""
    return f"{said} (95 % interval of the change: {low:+.3g} to {high:+.3g}{chance})"
