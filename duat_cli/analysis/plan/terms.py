"""Terms of a memory peak that several commands have."""

from __future__ import annotations

import re

from duat_cli.analysis.plan.shape import Shape
from duat_cli.analysis.plan.waves import recorded_bytes
from duat_cli.loading.checkpoint.parts import Part
from duat_cli.models.budgets import AT_ONCE
from duat_cli.results.plan import MemoryTerm, Residence

Moment = list[MemoryTerm]  # terms that are in memory at the same time

LIBRARIES = 426 << 20  # Python, torch, transformers and duat, imported
LIBRARIES_GPU = 72 << 20  # on a GPU: workspaces of its libraries, and gaps between tensors
TORCH = 402 << 20  # as LIBRARIES, without transformers
STRUCTURE = 1 << 20  # per block, discovery's results
REUSED = "freed memory that is used again"
SHARING = "processes that share the prompts"
FORKED = 16 << 20  # per forked process: what libraries allocate and change there
CHECKED = 32  # tokens of the random prompt on which the pass under instruments is compared with the plain one
CHECKED_LOGITS = 4  # (CHECKED, vocabulary): logits of both passes, and their probabilities

# always in main memory, also where a GPU computes
IMPORTED = "libraries"
READERS, READERS_SIZE = "libraries that read images and sound", 8 << 20
PREPARED = "products in half precision, prepared"
MERGING = "experts, while they are put together"
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
NEXT_BLOCK, STORED_BESIDE = "the next block, as stored", "stored bytes beside it"
NAMES, READINGS, REPORT = "names of all terms", "readings of all terms", "the report's terms"
PREDICTIONS = "predictions in the report"

# tensors alive at once for one prompt in one block; N tokens
SCORES = 3  # (H, N, N): scores, their softmax, and what is recorded
STREAMS = 6  # (N, M): the stream, its parts and replays
FFN = 3  # (N, F)
STATES = 4.3  # (N, channels, state), in a kernel that treats each channel by itself
REPLAYED = 8  # (N, M) for each term that is carried through a block

PROOF = "the proof of one block"
PROBED = "what all blocks do with the probe, written down"
PROVED = 8  # replays that go together through a block that is proved
REPLAYS = 16  # (N, M) of each replay of a proof: the stream, keys and values, what attention and FFN give


def term(what: str, size: float) -> MemoryTerm:
    return MemoryTerm(what=what, bytes=int(size))


def size_of(moment: Moment) -> int:
    return sum(one.bytes for one in moment)


def recorded_of(shape: Shape, ending: int, tokens: int) -> int:
    """Bytes of one recorded prompt: every block call, the mask and the output."""
    return (
        recorded_bytes(tokens, len(shape.parts.blocks), shape.stream, shape.element) + tokens * ending * shape.element
    )


def on_gpu(shape: Shape, moment: Moment) -> Moment:
    """The part of a moment that is in a GPU's memory. Tensors get there as they are stored, and are cast there."""
    cast = shape.largest_tensor if shape.largest_tensor != shape.largest_elements * shape.element else 0
    most = {IMPORTED: LIBRARIES_GPU, NEXT_BLOCK: cast, STORED_BESIDE: cast}
    most |= dict.fromkeys((NAMES, READINGS, REPORT, PREDICTIONS, PREPARED, READERS), 0)
    return [term(one.what, min(one.bytes, most.get(one.what, one.bytes))) for one in moment]


def held(shape: Shape, weights: Residence, *, running: bool = True) -> Moment:
    """The terms that are always in memory. running: whether the model has been discovered."""
    found = [term(IMPORTED, LIBRARIES)]
    if weights == "resident":
        found.append(term("weights", shape.weights))
    else:
        found.append(term("weights outside of large layers", shape.parts.frame.elements * shape.element))
    if running:
        found.append(term("the model's structure", structure_bytes(shape)))
    return found


def loading(shape: Shape, *, gpu: bool) -> MemoryTerm:
    """Memory of tensors that are being read into a model in memory; on a GPU those being cast, one per thread."""
    if gpu:
        return term("the largest tensors, as stored", shape.cast_at_once)
    return term("the largest tensor, as stored", shape.largest_tensor)


def structure_bytes(shape: Shape) -> int:
    """Bytes of discovery's results on the blocks, and of the logits with which it tests the head."""
    return len(shape.parts.blocks) * STRUCTURE + CHECKED_LOGITS * CHECKED * shape.vocabulary * shape.wide


def replayed(shape: Shape, terms: int, tokens: int) -> int:
    """Bytes to carry terms through a block, some at once."""
    return REPLAYED * min(AT_ONCE, terms) * shape.stream * tokens * shape.wide


def page_of(shape: Shape) -> Moment:
    """The largest block, the next one as stored, and what a block takes beyond that while its experts are merged."""
    blocks = shape.parts.blocks
    made = max((block.elements * shape.element for block in blocks), default=0)
    stored = max((block.read for block in blocks), default=0)
    following = stored if len(blocks) > 1 else 0
    merging = max((_merging(block, shape.element) for block in blocks), default=0)
    return [term("one block", made), term(NEXT_BLOCK, following), term(MERGING, max(0, merging - made - following))]


def _merging(block: Part, element: int) -> int:
    """Bytes of a block while transformers merges the first layers of all experts, two thirds of their weights, into one
    tensor, where the files have a tensor for each: stored tensors, these layers one by one and merged, and what was
    cast before. 0 without such experts."""
    experts = sum(tensor.elements for name, tensor in block.tensors.items() if _ONE_EXPERT.search(name)) * element
    if not experts:
        return 0
    made, first = block.elements * element, 2 * experts // 3
    return block.read + first + (first if block.read == made else made)


def layer_of(shape: Shape) -> Moment:
    """Memory of the largest layer outside of the blocks that may be a head; none where that is part of the frame."""
    layer = max(heads_of(shape), key=lambda one: one.elements, default=None)
    if layer is None:
        return []
    return [term(layer.name, layer.elements * shape.element), term(STORED_BESIDE, layer.read)]


def heads_of(shape: Shape) -> list[Part]:
    """Layers outside of the blocks that may be a head, or tied to one. A layer with longer rows than the stream is a
    table in which rows are looked up (the embeddings of all blocks in Gemma 4)."""
    return [layer for layer in shape.parts.layers if all(t.shape[-1] <= shape.width for t in layer.tensors.values())]


def through_block(shape: Shape, tokens: int) -> MemoryTerm:
    """Memory of one prompt while it goes through one block."""
    kernel = STATES * shape.channels * shape.state
    sizes = SCORES * shape.heads * tokens**2 + tokens * (STREAMS * shape.stream + FFN * shape.inner + kernel)
    return term("one prompt through one block", sizes * shape.wide)


def proof_bytes(shape: Shape, n: int) -> float:
    """Of a probe of so many tokens while discovery proves one block on it, with H held."""
    return (shape.heads * n**2 + PROVED * REPLAYS * n * shape.stream) * shape.wide


def probed(shape: Shape, n: int) -> MemoryTerm:
    """What all blocks do with a probe of so many tokens, noise of the shape of a picture or a sound, written down to
    find terms. Of texts the probe is short."""
    return term(PROBED, len(shape.parts.blocks) * through_block(shape, n).bytes)
