"""Peak memory of a run, as a sum of terms.

The sizes of tensors follow from the model's shape; the two constants and the counts of tensors alive at once were
measured as peaks of processes on the bundled demo and on llama shapes of 135M and 1.1B parameters, Linux, CPU. They
hold with `return_freed_memory`, without which glibc keeps up to a third more.

N: tokens of the longest prompt; M, H, K, d: width, heads, kv-heads and width of a head; F: the longest side of a
block's matrices; w: bytes of a number, at least 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.waves import state_bytes, waves
from duat_cli.results.plan import MemoryTerm, Planned, Residence

LIBRARIES = 390 << 20  # Python, torch, transformers and duat, imported
SPARE = 1.25  # memory that must be left for a byte of a second model: the first one's blocks run beside it
ENTRIES = 2048  # sampled of every V_h O_h, kept for every block
ROWS = 1 << 19  # elements of Ĥ that `inspect` works on at once

# tensors alive at once
SCORES = 3  # (H, N, N) in the pass: scores, their softmax, and what is recorded
RECORDED = 2  # (H, N, N) afterwards: what is recorded, and H of W'
STREAMS = 6  # (N, M): the stream, its parts and what is replayed
FFN = 3  # (N, F)
GRAMS = 2  # (N, H, M): the values through O, and an operand of their products
PIECES = 6  # ROWS elements


def peak(shape: Shape, command: Planned, tokens: Sequence[int], weights: Residence) -> list[MemoryTerm]:
    """The terms of the largest of the moments that a run goes through."""
    moments = _resident(shape, command, tokens) if weights == "resident" else _streamed(shape, command, tokens)
    return max(moments, key=lambda terms: sum(term.bytes for term in terms))


def _resident(shape: Shape, command: Planned, tokens: Sequence[int]) -> list[list[MemoryTerm]]:
    """While weights are read, one stored tensor stands beside the ones in memory. Then all V of the model are held
    twice: as read, and with the gain of the norm in front."""
    held = [_term("libraries", LIBRARIES), _term("weights", shape.weights)]
    kept = _term("values of all blocks, V", 2 * len(shape.parts.blocks) * shape.values)
    return [
        [*held, _term("the largest tensor, as stored", shape.largest_tensor)],
        [*held, kept, *_working(shape, command, tokens)],
    ]


def _streamed(shape: Shape, command: Planned, tokens: Sequence[int]) -> list[list[MemoryTerm]]:
    """A block stands beside the stored bytes from which it is made, then beside those of the next one. Embeddings and
    heads are read whole once, for the fingerprint, after the last block, of which V and O are still held."""
    frame = shape.parts.frame.elements * shape.element
    held = [_term("libraries", LIBRARIES), _term("weights outside of large layers", frame)]
    stored, made = (max(sizes, default=0) for sizes in (
        [block.stored for block in shape.parts.blocks],
        [block.elements * shape.element for block in shape.parts.blocks],
    ))  # fmt: skip
    sizes = [state_bytes(count, shape.width, shape.element) for count in tokens]
    waiting = max(sum(sizes[number] for number in wave) for wave in waves(tokens, shape.width, shape.element))
    found = [
        [
            *held,
            _term("one block", made),
            _term("the next block, as stored", stored if len(shape.parts.blocks) > 1 else 0),
            _term("values of the block, V", 2 * shape.values),
            _term("prompts in front of the block", waiting),
            *_working(shape, command, tokens),
        ]
    ]
    for layer in shape.parts.layers:
        size = layer.elements * shape.element
        beside = stored if size == layer.stored else max(layer.stored, stored)
        found.append(
            [
                *held,
                _term(layer.name, size),
                _term("stored bytes beside it", beside),
                _term("V and O of the last block", 2 * shape.values + shape.outputs),
                _term("entries of V O", _entries(shape, command)),
            ]
        )
    return found


def _working(shape: Shape, command: Planned, tokens: Sequence[int]) -> list[MemoryTerm]:
    """Of one prompt at one block, the longest one: its pass, then what is computed of W'.

    The Gram matrix of the heads is a sum over (H d, H d) products, two in w and one in float64, and one of (K d, K d).
    """
    n, scores = max(tokens, default=0), shape.heads * max(tokens, default=0) ** 2 * shape.wide
    streams = STREAMS * shape.width * n * shape.wide
    through = [
        _term("one prompt through one block", SCORES * scores + streams + FFN * shape.inner * n * shape.wide),
    ]
    if command != "inspect":
        return through
    side, few = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    gram = side * side * (2 * shape.wide + 8) + few * (few + shape.width) * shape.wide
    pieces = PIECES * min(ROWS, shape.heads * n * n) * shape.wide
    products = GRAMS * shape.width * shape.heads * n * shape.wide
    after = [
        _term("one prompt behind one block", RECORDED * scores + streams),
        _term("statistics of W'", max(gram, products + pieces)),
    ]
    entries = _term("entries of V O", _entries(shape, command))
    return [*max(through, after, key=lambda terms: sum(term.bytes for term in terms)), entries]


def _entries(shape: Shape, command: Planned) -> int:
    return ENTRIES * shape.heads * shape.wide * len(shape.parts.blocks) if command == "inspect" else 0


def _term(what: str, size: int) -> MemoryTerm:
    return MemoryTerm(what=what, bytes=size)
