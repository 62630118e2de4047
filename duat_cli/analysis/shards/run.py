"""The work of one process in a command with `--out`: its own prompts that have no result yet.

Every process runs the set's first prompt, even if it belongs to another. The facts on the model in a report are found
there, such as the error of the model with instruments against the model without, as in a report of one process.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from pydantic import BaseModel, JsonValue

from duat_cli import __version__
from duat_cli.analysis.plan.waves import SIDE_BY_SIDE
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.ranks import Ranks, each_alone, owners
from duat_cli.analysis.shards.records import Manifest, PromptRecord, written
from duat_cli.cache.tensors import gram_key
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import tokenizer_files
from duat_cli.loading.prompt_set import PromptSet, digest_of
from duat_cli.loading.prompts import Prompt

GRACE = 60.0  # most seconds between the first and the last start of the processes of one launch
Together: TypeAlias = "Callable[[array[int]], array[int]]"
"""Tokens of prompts, by position -> the first prompt of each one's batch."""


class Worker(Protocol):
    """A command that keeps the result of every prompt."""

    command: str
    """Its name."""
    settings: Mapping[str, JsonValue]
    """Options that numbers or the report depend on."""

    def begin(self, first: Prompt, /, *, own: bool) -> Sequence[PromptRecord]:
        """Runs the set's first prompt as far as needed for `facts`. Returns its record if that took its whole result,
        otherwise nothing.

        own: whether that prompt belongs to this process, which is then the first.
        """
        return self([(0, first)])

    def together(self) -> Together | None:
        """How prompts form batches; None where they run one by one. Called after `begin`."""
        return None

    def __call__(self, chunk: Sequence[tuple[int, Prompt]], /) -> Sequence[PromptRecord]:
        """Records of prompts, which come with their positions in the set: a batch, or prompts that run one by one."""
        ...

    def facts(self) -> BaseModel:
        """The part of the report that no prompt changes; called after `begin`."""
        ...

    def beside(self, folder: Folder, counts: set[int], ranks: Ranks, /) -> None:
        """Adds what the report needs beside the results of prompts, if it is missing. counts: tokens of the prompts."""
        return


def share(
    path: Path, session: Session, prompts: PromptSet, worker: Worker, ranks: Ranks, progress: Progress
) -> Folder | None:
    """Adds this process's results to the folder. The first rank waits for the others and returns it, to be merged."""
    _, first = next(prompts.prompts(lambda position: position == 0))
    first_record = worker.begin(first, own=ranks.first)
    leaders, counted = each_alone(len(prompts.keys)), None
    if (together := worker.together()) is not None:
        counted = _counts(prompts, lambda _: True)
        leaders = together(counted)
    folder = Folder.open(path, _manifest(session, prompts, worker), prompts.keys, leaders)
    with folder.shard(ranks) as shard:
        begun = time.monotonic()
        index = folder.index()
        mine = bytearray(owner == ranks.rank for owner in owners(prompts.keys, leaders, ranks.world))
        left = bytearray(len(leaders))
        for position, leader in enumerate(leaders):  # batches run as a whole
            left[leader] |= mine[position] and not index.has(position)
        counts = {n for n, is_mine in zip(index.tokens, mine, strict=True) if n and is_mine}

        def is_left(position: int) -> bool:
            return bool(left[leaders[position]])

        # reads all prompts now, so that one that cannot be run is reported before hours of work on others
        counts.update(_counts(prompts, is_left) if counted is None else itertools.compress(counted, mine))
        several = 1 if session.loaded.paged is None else SIDE_BY_SIDE
        for chunk in _chunks(prompts.prompts(is_left), leaders, several):
            # the set's first prompt, if left, is in the first chunk; after that its record would only take memory
            known, first_record = (first_record if chunk[0][0] == 0 else ()), ()
            rest = chunk[len(known) :]
            for (position, prompt), record in zip(chunk, [*known, *(worker(rest) if rest else ())], strict=True):
                if not index.has(position):
                    shard.append(written(folder.seal, position, prompt, record))
        worker.beside(folder, counts, ranks)
    if not ranks.first:
        return None
    _await_others(folder, ranks, progress, begun + GRACE)
    worker.beside(folder, folder.index().counts(), ranks)
    return folder


def _await_others(folder: Folder, ranks: Ranks, progress: Progress, until: float) -> None:
    """Waits until every prompt has a result. Raises InputError, which names the ranks, if some have died, or have not
    begun before `until` (monotonic seconds)."""
    pause = 0.05  # seconds; each pause is a fifth longer than the one before
    while True:
        living = folder.held(ranks.world)
        if living:
            progress(0, 0, f"waiting for rank {', '.join(map(str, living))} of {ranks.world}")
        else:
            index = folder.index()
            if index.found == len(folder.keys):
                return
            if time.monotonic() > until:
                raise InputError(folder.missing(index, ranks.world))
        time.sleep(pause)
        pause = min(1.2 * pause, 1.0)


def _counts(prompts: PromptSet, wanted: Callable[[int], bool]) -> array[int]:
    """Tokens of each wanted prompt."""
    return array("I", (prompt.input_ids.shape[1] for _, prompt in prompts.prompts(wanted)))


def _chunks(
    prompts: Iterable[tuple[int, Prompt]], leaders: array[int], several: int
) -> Iterator[list[tuple[int, Prompt]]]:
    """Batches as they become complete, and prompts without a batch, `several` at a time. leaders: as for `owners`.

    The prompts of a batch wait without the spans of their tokens in the text, which take more memory than all the rest,
    and which no command with batches needs.
    """
    sizes, waiting = np.bincount(np.frombuffer(leaders, np.uint32)), dict[int, list[tuple[int, Prompt]]]()
    singles: list[tuple[int, Prompt]] = []
    for position, prompt in prompts:
        leader = leaders[position]
        if sizes[leader] == 1:
            singles.append((position, prompt))
            if len(singles) == several:
                yield singles
                singles = []
            continue
        batch = waiting.setdefault(leader, [])
        batch.append((position, replace(prompt, spans=None)))
        if len(batch) == sizes[leader]:
            yield waiting.pop(leader)
    if singles:
        yield singles


def _manifest(session: Session, prompts: PromptSet, worker: Worker) -> Manifest:
    loaded = session.loaded
    tokenizer = hashlib.sha256()
    for file in tokenizer_files(loaded.files.path):
        tokenizer.update(file.name.encode() + b"\0" + file.read_bytes())
    tokenizer.update(prompts.template.encode())
    environment, facts = session.environment(), worker.facts().model_dump(mode="json")
    # without the number of a GPU, as each process may have its own
    environment = environment.model_copy(update={"device": environment.device.partition(":")[0]})
    if "environment" in facts:
        facts["environment"] = environment.model_dump(mode="json")
    return Manifest(
        command=worker.command,
        duat_version=__version__,
        in_parts=loaded.paged is not None,
        arithmetic=gram_key(session.fingerprint, loaded.model),
        tokenizer=tokenizer.hexdigest(),
        prompts=len(prompts.keys),
        prompt_set=digest_of(prompts.keys),
        environment=environment,
        fingerprint=session.fingerprint,
        settings=dict(worker.settings),
        facts=facts,
    )
