"""Which prompts run together as one batch, and whether they can.

A small model spends its time on calls, not on products: in a toy model of two layers, a prompt alone takes four times
as long as one in a batch of sixteen. Which prompts run together follows from the set of prompts alone, so that no
number depends on how many processes share it, or on where a run was resumed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from pydantic import BaseModel

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.sweep import sweep_batch
from duat_cli.analysis.inspect.total import PromptSweep
from duat_cli.analysis.session import Session
from duat_cli.grouping import by_key
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import tolerance_for, wide
from duat_cli.models.budgets import BATCH_BYTES_GPU, batched_bytes, most_together
from duat_cli.models.discovery.modality import probe_ids
from duat_cli.results.meaning import meaning_of

SLICE = 4096  # consecutive prompts within which those with equally many tokens are batched
ATTENTION = 1 << 18  # elements of H of all heads in a batch: with more, tensors leave the processor's cache
STREAM = 1 << 17  # elements of the hidden states of a batch
PROBES = (3, 7)  # number of made-up prompts, and of their tokens


Sizes = Callable[[int], int]
"""Tokens of a prompt -> how many such prompts run together."""


def sizes(session: Session, options: InspectOptions, prompts: int) -> Sizes:
    """Batch sizes for a set of so many prompts. Always 1 where the options or the model take prompts one by one, or
    where made-up prompts give other numbers in a batch than alone."""
    most = most_together(prompts)
    if most == 1 or not _possible(session, options) or not _agree(session, options):
        return lambda tokens: 1
    heads, width = session.heads, session.structure.hidden_size
    if session.loaded.device.startswith("cuda"):  # a GPU waits for Python if blocks are small, so batches are larger
        size = wide(torch.empty(0, dtype=session.loaded.model.dtype)).itemsize
        return lambda tokens: max(1, min(most, BATCH_BYTES_GPU // batched_bytes(tokens, width, heads, size)))
    return lambda tokens: max(1, min(most, ATTENTION // (heads * tokens**2), STREAM // (width * tokens)))


def leaders_of(session: Session, options: InspectOptions, counts: Sequence[int]) -> array[int]:
    """Result of `leaders` for a session, which has to have run a prompt. counts: tokens of each prompt."""
    found = leaders(counts, sizes(session, options, len(counts)))
    session.batch_size = int(np.bincount(np.frombuffer(found, np.uint32)).max())
    return found


def leaders(counts: Iterable[int], size: Sizes) -> array[int]:
    """For each prompt, the position of the first prompt in its batch. The first prompt of the set, on which the model
    is compared with the untouched one, is alone. counts: tokens of each prompt."""
    found, begun = array("I"), dict[int, tuple[int, int]]()  # tokens -> (leader, free places in its batch)
    for position, tokens in enumerate(counts):
        if position % SLICE == 0:
            begun.clear()
        leader, room = begun.get(tokens, (position, 0))
        if not room:
            leader, room = position, size(tokens) if position else 1
        begun[tokens] = leader, room - 1
        found.append(leader)
    return found


def batches(leading: array[int], begun: int = 0) -> list[list[int]]:
    """The positions of the prompts of every batch, leaving out positions before `begun`."""
    places = enumerate(leading[begun:], begun)
    return [*by_key((leader, position) for position, leader in places).values()]


# -- whether it can be done ------------------------------------------------------------------------------------


def _possible(session: Session, options: InspectOptions) -> bool:
    """Whether batches can be tried: no option, and nothing known of the model, rules them out."""
    more = options.terms or options.end_to_end or options.routing or options.spectrum
    loaded = session.loaded  # in a narrow dtype, products of other sizes round visibly differently
    return loaded.paged is None and loaded.like is None and loaded.model.dtype.itemsize >= 4 and not more


def _agree(session: Session, options: InspectOptions) -> bool:
    """Whether made-up prompts give the same numbers in a batch as alone, up to the tolerance of a certificate."""
    prompts, tokens = PROBES
    ids = probe_ids(session.structure.stack, prompts * tokens, device="cpu").reshape(prompts, 1, tokens)
    made_up = [Prompt("", "", one, 0) for one in ids]
    together = sweep_batch(session, made_up, options)
    alone = [sweep_batch(session, [one], options) for one in made_up]
    if together is None or None in alone:
        return False
    tolerance = tolerance_for(torch.float32)
    pairs = zip(_numbers(together), _numbers([one for some in alone for one in some or ()]), strict=True)
    return all(a == b if a is None or b is None else abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)


def _numbers(sweeps: Sequence[PromptSweep]) -> list[float | None]:
    """The numbers of all blocks that are closed forms: no errors, which are rounding themselves, and no estimates."""
    return [number for sweep in sweeps for block in sweep.blocks.values() for number in _exact(block)]


def _exact(result: BaseModel) -> Iterator[float | None]:
    for name in type(result).model_fields:
        value = getattr(result, name)
        if isinstance(value, BaseModel):
            yield from _exact(value)
        elif meaning_of(type(result), name).exactness == "exact":
            yield value
