"""What goes side by side through weights that are read block by block."""

from __future__ import annotations

from collections.abc import Sequence

WAVE_BYTES = 256 << 20  # of the states of prompts that stand between two blocks
RECORDED_BYTES = 512 << 20  # of the block calls of prompts whose gradients go back together
SIDE_BY_SIDE = 32  # prompts of `--out` that go together; a run that dies loses so many
CALLS = 1  # (N, M) of a recorded block call: what is behind it is in front of the next one
STATES = 8  # (N, M) of such a prompt: the stream, its parts, what the model's own forward holds


def state_bytes(tokens: int, width: int, element: int) -> int:
    """Of a prompt that stands between two blocks: its hidden states, and the mask of its attention.

    tokens: N; width: M; element: bytes of a number.
    """
    return element * tokens * (STATES * width + tokens)


def recorded_bytes(tokens: int, blocks: int, width: int, element: int) -> int:
    """Of every block call of a prompt, and its mask."""
    return element * tokens * (CALLS * blocks * width + tokens)


def recorded_waves(tokens: Sequence[int], blocks: int, width: int, element: int) -> list[range]:
    """Numbers of prompts that are recorded side by side, to go back through the blocks together."""
    return waves([recorded_bytes(count, blocks, width, element) for count in tokens], RECORDED_BYTES)


def prompt_waves(tokens: Sequence[int], width: int, element: int) -> list[range]:
    """Numbers of prompts, of so many tokens, that go side by side."""
    return waves([state_bytes(count, width, element) for count in tokens], WAVE_BYTES)


def waves(sizes: Sequence[int], limit: int) -> list[range]:
    """Numbers of those that go side by side, in order, as many as fit; one empty wave for none.

    sizes: bytes of each, whatever goes side by side; limit: bytes of a wave.
    """
    found, first, taken = list[range](), 0, 0
    for number, size in enumerate(sizes):
        if number > first and taken + size > limit:
            found.append(range(first, number))
            first, taken = number, 0
        taken += size
    return [*found, range(first, len(sizes))]
