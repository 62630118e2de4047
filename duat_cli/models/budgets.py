"""Limits on the amount of work that is done at once. Memory plans use the same numbers, without importing torch."""

from __future__ import annotations

from collections.abc import Sequence

MEASURED_ELEMENTS = 1 << 19
"""Elements of Ĥ that `inspect` works on at once: as many as a processor's caches hold."""
MEASURED_ELEMENTS_GPU = 1 << 25
"""Elements of Ĥ at once on a GPU, where large pieces are faster, because each piece takes a number of launches."""
IMPULSES = 1 << 20
"""Values that go through a kernel at once to show its H, or those of one prompt if these are more. For each of them the
kernel may hold a state of 16 or more numbers."""
CHANNEL_HEADS = 8192
"""Largest number of heads of one channel each for which W' is measured."""
MATRIX_SIDE = 4096
"""Longest side of a matrix that `duat matrix` builds entry by entry: 64 MiB in float32."""
PROBE_ELEMENTS = 1 << 23
"""Elements of probes in the output's space that are drawn at once: 32 MB in float32."""
PULLED_ELEMENTS = 1 << 25
"""Elements of the gradients of many probes at the stream, which go from block to block: 128 MB in float32."""
GRADIENT_BYTES = 256 << 20
"""Bytes of the gradients of many probes in one block."""
ABLATION_BYTES = 512 << 20
"""Bytes of passes that wait for the next block at the same time."""
PATCH_VECTORS = 8
"""Tensors (N, M) kept per block of each prompt whose parts go into another prompt's pass: those that the block took and
gave, and those that its FFN gave."""
HELD = 1.5
"""Tensors of the stream's size that a waiting pass holds, beside its mask."""
LEADING = 2
"""Waiting passes that together hold as much as one that goes a block ahead, with the hidden states around a block."""
ROW_TOKENS = 512
"""Tokens, over all rows, of removals that share one pass of a prompt; with more it is no faster."""
ROW_BLOCKS = 1
"""Blocks by which a removal may begin later than the first of its pass; it goes through these blocks for nothing."""
ROW_ELEMENTS = 1 << 24
"""Elements of the outputs of removals that share a pass: 64 MB in float32."""
KEPT_BYTES = 512 << 20
"""Bytes of prompts' own passes that sets of a repair are compared with, and bytes of states for its fit."""
TARGET_BYTES = 256 << 20
"""Bytes of the gradients of several targets of a prompt in one block."""
CARRIED = 256
"""Largest number of terms of a model that are all carried to the last block; of more, only those that are ablated."""
AT_ONCE = 32
"""Terms carried to the last block in one replay of a block."""
PRINTED_BYTES = 256 << 20
"""Bytes of the vectors that are carried to the last block for Eq. 16, over all prompts on which it is computed."""
PRINTED_TERMS = 64
"""Largest set whose terms are all carried one by one for Eq. 16; of a larger one as many are drawn, over all blocks."""
DRAWN_IN_BLOCK = 2
"""Least number of terms drawn in a block: a single one would not show how far off it is."""
LIKELY_SETS = 4
"""Sets of one order that are carried while it is measured which of them is chosen."""
BATCH_BYTES_GPU = 1 << 30
"""Approximate bytes of a batch of prompts at one block on a GPU."""
FEWEST_BATCHES = 64
"""Least number of batches that a set of prompts is divided into, so that processes can share it."""
NEURONS_AT_ONCE = 1024
"""Neurons of an FFN whose weight rows are in float64 at once."""
SOURCE_ELEMENTS = 1 << 22
"""Elements of the source tokens' pieces that are replayed at once."""
BOUNDED_ENTRIES = 1 << 21
"""Entries of V over the heads whose bounds are computed at once."""


def measured_at_once(heads: int, *, gpu: bool) -> int:
    """Elements of Ĥ that are worked on at once, at least heads². Every piece adds a matrix (heads, heads) to the sums,
    which for thousands of heads and few rows takes longer than the products."""
    return max(MEASURED_ELEMENTS_GPU if gpu else MEASURED_ELEMENTS, heads * heads)


def drawn_in_block(terms: int, blocks: int) -> int | None:
    """How many terms are drawn in each block for a set of `terms` terms in `blocks` blocks; None: all are taken."""
    return None if terms <= PRINTED_TERMS else max(DRAWN_IN_BLOCK, PRINTED_TERMS // blocks)


def printed_vectors(terms: int, blocks: int) -> int:
    """How many vectors are carried for a set of at most `terms` terms in `blocks` blocks: its sum, the stream without
    it, and single terms."""
    return 2 + min(terms, max(PRINTED_TERMS, DRAWN_IN_BLOCK * blocks))


def printed_bytes(tokens: int, width: int, vectors: int) -> int:
    """Bytes of one prompt with so many vectors per token."""
    return tokens * width * 4 * vectors


def printed_on(tokens: Sequence[int], most: int | None, width: int, vectors: int) -> list[int]:
    """Numbers of the first prompts, no more than `most`, that fit into PRINTED_BYTES together.

    tokens: number of tokens of each prompt. vectors: as in `printed_bytes`.
    """
    left, found = PRINTED_BYTES, list[int]()
    for number, count in enumerate(tokens):
        size = printed_bytes(count, width, vectors)
        if size <= left and (most is None or len(found) < most):
            found.append(number)
            left -= size
    return found


def likely_sets(tokens: int, width: int, known: int, each: int) -> int:
    """How many sets of every order go side by side, so that all fit into PRINTED_BYTES; at least one.

    tokens: of all prompts together. known: vectors that are carried anyway. each: vectors of one set of every order.
    """
    return max(1, min(LIKELY_SETS, (PRINTED_BYTES // printed_bytes(tokens, width, 1) - known) // each))


def most_together(prompts: int) -> int:
    """How many prompts, of a set of `prompts`, may run as one batch; one where the set is too small."""
    return max(1, prompts // FEWEST_BATCHES)


def batched_bytes(tokens: int, width: int, heads: int, size: int) -> int:
    """Approximate bytes of one prompt of a batch at one block: its stream and its FFN, its values through O, and its H.

    size: bytes of a number.
    """
    return size * tokens * (width * (18 + 2 * heads) + 3 * heads * tokens)


def probes_at_once(elements: int) -> int:
    """How many probes are drawn and taken through the head at once. elements: number of elements of the output."""
    return max(1, PROBE_ELEMENTS // max(1, elements))


def pulled_at_once(elements: int) -> int:
    """How many probes' gradients are carried through all blocks at once. elements: number of elements of the stream."""
    return max(1, PULLED_ELEMENTS // max(1, elements))


def gradient_elements(width: int, tokens: int, heads: int, captured: int) -> int:
    """Elements of one probe's gradients at one block, generously: at sites, at norms and at attention matrices.

    captured: elements of the sites' tensors.
    """
    return 8 * width * tokens + 4 * captured + 3 * heads * tokens**2


def target_bytes(tokens: int, width: int, neurons: int) -> int:
    """Approximate bytes of one target's gradients in one block."""
    return 8 * tokens * (8 * width + 3 * neurons)


def rows_at_once(tokens: int, elements: int) -> int:
    """How many removals share one pass of a prompt of so many tokens. elements: number of elements of one output."""
    return max(1, min(ROW_TOKENS // max(1, tokens), ROW_ELEMENTS // max(1, elements)))


def waiting_bytes(tokens: int, width: int) -> int:
    """Approximate bytes of a pass that waits for the next block, with its mask."""
    return int(tokens * (HELD * width + tokens) * 4)
