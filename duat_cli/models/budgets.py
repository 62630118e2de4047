"""How much of what can be done at once is done at once. Plans of memory count with the same numbers, without torch."""

from __future__ import annotations

from collections.abc import Sequence

MEASURED_ELEMENTS = 1 << 19
"""Of Ĥ that `inspect` works on at once: what a processor's caches hold."""
MEASURED_ELEMENTS_GPU = 1 << 25
"""The same on a GPU, which is kept busy by large pieces: each is a number of launches."""
IMPULSES = 1 << 20
"""Values that go through a kernel at once to show its H, which may hold a state of 16 or more for each; of at least one
prompt."""
CHANNEL_HEADS = 8192
"""Heads of one channel each whose W' is measured, at most."""
PROBE_ELEMENTS = 1 << 23
"""Of probes in the output's space that are drawn at once: 32 MB in float32."""
PULLED_ELEMENTS = 1 << 25
"""Of the gradients of many probes at the stream, which go from block to block: 128 MB in float32."""
GRADIENT_BYTES = 256 << 20
"""Of one block's gradients of many probes."""
ABLATION_BYTES = 512 << 20
"""Of passes that wait for the next block at the same time."""
PATCH_VECTORS = 8
"""(N, M) that are kept of a block under each prompt whose parts go into another's pass: what it took and gave, and what
its FFN gave."""
HELD = 1.5
"""Tensors of the stream's size that such a pass holds, beside its mask."""
LEADING = 2
"""Such passes hold as much as one that goes a block ahead of others: its hidden states, and those around that block."""
ROW_TOKENS = 512
"""Of removals that go side by side through one prompt's pass: more of them are no faster."""
ROW_BLOCKS = 1
"""How much later than the first of them another may begin: it goes through the blocks up to there for nothing."""
ROW_ELEMENTS = 1 << 24
"""Of their outputs: 64 MB in float32."""
KEPT_BYTES = 512 << 20
"""Of prompts' own passes that every set of a repair is compared with; and as much of what it is fitted to."""
TARGET_BYTES = 256 << 20
"""Of one block's gradients of several targets of a prompt."""
CARRIED = 256
"""Terms of a model that are all carried to the last block; of more, those that are ablated."""
AT_ONCE = 32
"""Of these in one replay of a block."""
PRINTED_BYTES = 256 << 20
"""Of what is carried to the last block for Eq. 16, under all prompts that it is computed on."""
PRINTED_TERMS = 64
"""Terms of a set that are carried one by one for it; of more, some are drawn in every block, and as many in all."""
DRAWN_IN_BLOCK = 2
"""Of them in a block, at least: one alone would not say how far off it is."""
LIKELY_SETS = 4
"""Of one order, that are carried while it is measured which of them is chosen."""
BATCH_BYTES_GPU = 1 << 30
"""Of a batch of prompts at one block on a GPU, about."""
FEWEST_BATCHES = 64
"""A set of prompts falls into as many batches at least, so that processes can share it."""
NEURONS_AT_ONCE = 1024
"""Of an FFN, whose rows of weights are in float64."""
BOUNDED_ENTRIES = 1 << 21
"""Of V, of the heads whose bounds are made at once."""


def measured_at_once(heads: int, *, gpu: bool) -> int:
    """Elements of Ĥ. What some rows add to the sums is (heads, heads): of thousands of heads, adding it for few rows
    takes longer than the products."""
    return max(MEASURED_ELEMENTS_GPU if gpu else MEASURED_ELEMENTS, heads * heads)


def drawn_in_block(terms: int, blocks: int) -> int | None:
    """Terms that are drawn in each block of a set of so many, which has some in so many blocks; None: all are taken."""
    return None if terms <= PRINTED_TERMS else max(DRAWN_IN_BLOCK, PRINTED_TERMS // blocks)


def printed_vectors(terms: int, blocks: int) -> int:
    """Of a set of at most so many terms in so many blocks: its sum, the stream without it, and the single terms."""
    return 2 + min(terms, max(PRINTED_TERMS, DRAWN_IN_BLOCK * blocks))


def printed_bytes(tokens: int, width: int, vectors: int) -> int:
    """Of one prompt, for so many vectors a token."""
    return tokens * width * 4 * vectors


def printed_on(tokens: Sequence[int], most: int | None, width: int, vectors: int) -> list[int]:
    """Numbers of the first prompts, no more than `most`, that fit into PRINTED_BYTES together.

    tokens: of each. vectors: as of `printed_bytes`.
    """
    left, found = PRINTED_BYTES, list[int]()
    for number, count in enumerate(tokens):
        size = printed_bytes(count, width, vectors)
        if size <= left and (most is None or len(found) < most):
            found.append(number)
            left -= size
    return found


def likely_sets(tokens: int, width: int, known: int, each: int) -> int:
    """Sets of every order that go side by side, so that all fit into PRINTED_BYTES; one at least.

    tokens: of all prompts together. known: vectors of what is carried anyway; each: those of one set of every order.
    """
    return max(1, min(LIKELY_SETS, (PRINTED_BYTES // printed_bytes(tokens, width, 1) - known) // each))


def most_together(prompts: int) -> int:
    """Prompts of a set of so many that may run as one batch: one where there are too few of them."""
    return max(1, prompts // FEWEST_BATCHES)


def batched_bytes(tokens: int, width: int, heads: int, size: int) -> int:
    """Of one prompt of a batch at one block, about: its stream and its FFN, its values through O, and its H.

    size: bytes of a number.
    """
    return size * tokens * (width * (18 + 2 * heads) + 3 * heads * tokens)


def probes_at_once(elements: int) -> int:
    """Probes that are drawn and taken through the head at once. elements: of the output."""
    return max(1, PROBE_ELEMENTS // max(1, elements))


def pulled_at_once(elements: int) -> int:
    """Probes whose gradients are carried through all blocks at once. elements: of the stream."""
    return max(1, PULLED_ELEMENTS // max(1, elements))


def gradient_elements(width: int, tokens: int, heads: int, captured: int) -> int:
    """Of one probe at one block, with room: at the sites, at the norms and at the attention matrices.

    captured: elements of the sites' tensors.
    """
    return 8 * width * tokens + 4 * captured + 3 * heads * tokens**2


def target_bytes(tokens: int, width: int, neurons: int) -> int:
    """Of one target's gradients in one block, about."""
    return 8 * tokens * (8 * width + 3 * neurons)


def rows_at_once(tokens: int, elements: int) -> int:
    """Removals that go side by side through one pass of a prompt of so many tokens. elements: of one's output."""
    return max(1, min(ROW_TOKENS // max(1, tokens), ROW_ELEMENTS // max(1, elements)))


def waiting_bytes(tokens: int, width: int) -> int:
    """Of a pass that waits for the next block, about, with its mask."""
    return int(tokens * (HELD * width + tokens) * 4)
