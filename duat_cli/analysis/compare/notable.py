"""What a reader of a comparison should see first, each sentence backed by the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.results.compare import BlockComparison

STEEP = 1.5  # an amplification that is worth a sentence


def notable(blocks: Sequence[BlockComparison]) -> list[str]:
    """At most four sentences."""
    return [*_operator(blocks), *_heads(blocks), *_amplified(blocks)]


def _operator(blocks: Sequence[BlockComparison]) -> list[str]:
    """The block whose W' moved most, what of it, and what positions and scales alone would have moved."""
    known = [block for block in blocks if block.operator.relative]
    if not known:
        return ["no operator W' moved"] if any(block.operator.relative == 0.0 for block in blocks) else []
    top = max(known, key=lambda block: block.operator.relative or 0.0)
    parts = {"routing": top.operator.routing or 0.0, "scale": top.operator.scale or 0.0}
    first = max(parts, key=lambda name: parts[name])
    null = top.operator.null.relative
    beside = "" if null is None else f"; with uniform attention it would be {100 * null:.3g} %"
    return [
        f"block {top.index}: W' moved most, by {100 * (top.operator.relative or 0):.3g} % of its norm, more by {first} "
        f"({100 * parts[first]:.3g} %){beside}"
    ]


def _heads(blocks: Sequence[BlockComparison]) -> list[str]:
    heads = [(head.relative, block.index, head.head) for block in blocks for head in block.heads if head.relative]
    if len(heads) < 2:
        return []
    (most, block, head), least = max(heads), min(heads)
    return [
        f"block {block} head {head} moved most of all heads ({100 * most:.3g} %), block {least[1]} head {least[2]} "
        f"least ({100 * least[0]:.3g} %)"
    ]


def _amplified(blocks: Sequence[BlockComparison]) -> list[str]:
    known = [block for block in blocks if block.amplification is not None]
    top = max(known, key=lambda block: block.amplification or 0.0, default=None)
    if top is None or (top.amplification or 0.0) < STEEP:
        return []
    return [f"block {top.index} drives the prompts apart most: relative change out over in {top.amplification:.3g}"]
