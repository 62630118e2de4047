"""Which prompts run together as one batch, and whether they can.

A small model spends its time on calls, not on products: of a toy of two layers a prompt alone takes four times as long
as one of sixteen. Which prompts run together follows from the set alone, so that no number depends on how many
processes share it, or on where a run was taken up.
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
from duat_cli.models.discovery.structure import probe_ids
from duat_cli.results.meaning import meaning_of

SLICE = 4096  # prompts, one behind the other, among which those of as many tokens are looked for
ATTENTION = 1 << 18  # elements of all heads' H of a batch: with more, tensors leave the processor's cache
STREAM = 1 << 17  # elements of the hidden states of a batch
PROBES = (3, 7)  # prompts, tokens


Sizes = Callable[[int], int]
"""How many prompts of so many tokens run together."""


def sizes(session: Session, options: InspectOptions, prompts: int) -> Sizes:
    """Of a set of so many prompts. Always one where the options or the model's blocks take prompts one by one, or where
    made-up prompts have other numbers in a batch than alone."""
    most = most_together(prompts)
    if most == 1 or not _possible(session, options) or not _agree(session, options):
        return lambda tokens: 1
    heads, width = session.heads, session.structure.hidden_size
    if session.loaded.device.startswith("cuda"):  # it waits for Python where a block is small
        size = wide(torch.empty(0, dtype=session.loaded.model.dtype)).itemsize
        return lambda tokens: max(1, min(most, BATCH_BYTES_GPU // batched_bytes(tokens, width, heads, size)))
    return lambda tokens: max(1, min(most, ATTENTION // (heads * tokens**2), STREAM // (width * tokens)))


def leaders_of(session: Session, options: InspectOptions, counts: Sequence[int]) -> array[int]:
    """As of `leaders`; to be asked once the session has run a prompt."""
    found = leaders(counts, sizes(session, options, len(counts)))
    session.batch_size = int(np.bincount(np.frombuffer(found, np.uint32)).max())
    return found


def leaders(counts: Iterable[int], size: Sizes) -> array[int]:
    """By position, of prompts of so many tokens: the first prompt of the batch that it is in. The set's first prompt,
    on which the model is compared with the untouched one, is alone."""
    found, begun = array("I"), dict[int, tuple[int, int]]()  # by tokens: (leader, how many it still takes)
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
    """The positions of every batch, of one prompt or several, without those in front of `begun`."""
    places = enumerate(leading[begun:], begun)
    return [*by_key((leader, position) for position, leader in places).values()]


# -- whether it can be done ------------------------------------------------------------------------------------


def _possible(session: Session, options: InspectOptions) -> bool:
    """Whether nothing speaks against it before it is tried."""
    more = options.terms or options.end_to_end or options.routing or options.spectrum
    loaded = session.loaded  # in a narrow dtype products of other sizes round visibly
    return loaded.paged is None and loaded.like is None and loaded.model.dtype.itemsize >= 4 and not more


def _agree(session: Session, options: InspectOptions) -> bool:
    """Whether made-up prompts have the numbers in a batch that each has alone, up to the tolerance of a certificate."""
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
    """What of their blocks is a closed form: no errors, which are rounding themselves, and nothing that is drawn."""
    return [number for sweep in sweeps for block in sweep.blocks.values() for number in _exact(block)]


def _exact(result: BaseModel) -> Iterator[float | None]:
    for name in type(result).model_fields:
        value = getattr(result, name)
        if isinstance(value, BaseModel):
            yield from _exact(value)
        elif meaning_of(type(result), name).exactness == "exact":
            yield value
