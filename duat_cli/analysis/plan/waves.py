"""Waves: prompts that go side by side through weights that are read block by block."""

from __future__ import annotations

from collections.abc import Sequence

WAVE_BYTES = 256 << 20  # states of prompts between two blocks
RECORDED_BYTES = 512 << 20  # block calls of prompts whose gradients go back together
SIDE_BY_SIDE = 32  # prompts that go together with `--out`; a run that dies loses so many
CALLS = 1  # (N, M) per recorded block call: the output of one is the input of the next
STATES = 8  # (N, M) per prompt between two blocks: the stream, its parts, what the model's own forward holds


def state_bytes(tokens: int, width: int, element: int) -> int:
    """Bytes of a prompt between two blocks: its hidden states, and the mask of its attention.

    tokens: N; width: M; element: bytes of a number.
    """
    return element * tokens * (STATES * width + tokens)


def recorded_bytes(tokens: int, blocks: int, width: int, element: int) -> int:
    """Bytes of every block call of a prompt, and of its mask."""
    return element * tokens * (CALLS * blocks * width + tokens)


def recorded_waves(tokens: Sequence[int], blocks: int, width: int, element: int) -> list[range]:
    """Numbers of prompts, in waves that are recorded side by side and go back through the blocks together."""
    return waves([recorded_bytes(count, blocks, width, element) for count in tokens], RECORDED_BYTES)


def prompt_waves(tokens: Sequence[int], width: int, element: int) -> list[range]:
    """Numbers of prompts, in waves that go side by side. tokens: of each prompt."""
    return waves([state_bytes(count, width, element) for count in tokens], WAVE_BYTES)


def waves(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive numbers in waves of as many as fit side by side; one empty wave without any.

    sizes: bytes of each item; limit: bytes of a wave.
    """
    found, first, taken = list[range](), 0, 0
    for number, size in enumerate(sizes):
        if number > first and taken + size > limit:
            found.append(range(first, number))
            first, taken = number, 0
        taken += size
    return [*found, range(first, len(sizes))]
