"""One process's part of a command with `--out`: the prompts that are its own and have no result yet.

Every process runs the set's first prompt, whoever it belongs to: what a report says of the model is found there,
such as how far the model with instruments is from the model without, as in a report of one process.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from duat_cli import __version__
from duat_cli.analysis.plan.waves import SIDE_BY_SIDE
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.ranks import Ranks, owners
from duat_cli.analysis.shards.records import Manifest, PromptRecord, Stored, written
from duat_cli.analysis.shards.state import await_others
from duat_cli.cache.tensors import gram_key
from duat_cli.loading.checkpoint.source import tokenizer_files
from duat_cli.loading.prompt_set import PromptSet, digest_of
from duat_cli.loading.prompts import Prompt
from duat_cli.results.base import Environment

GRACE = 60.0  # seconds that the processes of one launch may begin apart
R_co = TypeVar("R_co", covariant=True)


class Worker(Protocol[R_co]):
    """A command that keeps the result of every prompt."""

    command: str
    """Its name."""
    settings: Stored
    """The options that numbers or the report follow from."""

    def begin(self, first: Prompt) -> None:
        """Find out with the set's first prompt what `facts` says; where nothing less tells, by its whole result."""
        self([(0, first)])

    def __call__(self, chunk: Sequence[tuple[int, Prompt]], /) -> Sequence[PromptRecord]:
        """The results of prompts with their positions in the set."""
        ...

    def facts(self) -> Stored:
        """What its report says that no prompt changes; asked for behind `begin`."""
        ...

    def beside(self, folder: Folder, counts: set[int], ranks: Ranks, /) -> None:
        """What it needs beside the results of prompts of so many tokens, if it is not there yet."""
        ...

    def merged(self, folder: Folder, /) -> R_co:
        """The report of all prompts."""
        ...


def share(
    path: Path, session: Session, prompts: PromptSet, worker: Worker[R_co], ranks: Ranks, progress: Progress
) -> R_co | None:
    """This process's results into the folder. The first rank waits for the others and returns the report of all."""
    _, first = next(prompts.prompts(lambda position: position == 0))
    worker.begin(first)
    folder = Folder.open(path, _manifest(session, prompts, worker), prompts.keys)
    with folder.shard(ranks) as shard:
        begun = time.monotonic()
        index = folder.index()
        mine = bytearray(owner == ranks.rank for owner in owners(prompts.keys, ranks.world))
        left = bytearray(is_mine and not index.has(k) for k, is_mine in enumerate(mine))
        counts = {n for n, is_mine in zip(index.tokens, mine, strict=True) if n and is_mine}

        def is_left(position: int) -> bool:
            return bool(left[position])

        for _, prompt in prompts.prompts(is_left):  # one that cannot be run is said before hours of others
            counts.add(prompt.input_ids.shape[1])
        waiting = prompts.prompts(is_left)
        while chunk := list(itertools.islice(waiting, 1 if session.loaded.paged is None else SIDE_BY_SIDE)):
            for (position, prompt), record in zip(chunk, worker(chunk), strict=True):
                shard.append(written(folder.seal, position, prompt, record))
        worker.beside(folder, counts, ranks)
    if not ranks.first:
        return None
    await_others(folder, ranks, progress, begun + GRACE)
    worker.beside(folder, folder.index().counts(), ranks)
    return worker.merged(folder)


def _manifest(session: Session, prompts: PromptSet, worker: Worker[object]) -> Manifest:
    loaded = session.loaded
    tokenizer = hashlib.sha256()
    for file in tokenizer_files(loaded.files.path):
        tokenizer.update(file.name.encode() + b"\0" + file.read_bytes())
    return Manifest(
        command=worker.command,
        duat_version=__version__,
        in_parts=loaded.paged is not None,
        arithmetic=gram_key(session.fingerprint, loaded.model),
        tokenizer=tokenizer.hexdigest(),
        prompts=len(prompts.keys),
        prompt_set=digest_of(prompts.keys),
        environment=anywhere(session.environment()),
        fingerprint=session.fingerprint,
        settings=worker.settings.model_dump(mode="json", by_alias=True),
        facts=worker.facts().model_dump(mode="json"),
    )


def anywhere(environment: Environment) -> Environment:
    """Without the number of a GPU: each process may have one of its own."""
    return environment.model_copy(update={"device": environment.device.partition(":")[0]})
