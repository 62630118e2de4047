"""How far a folder of results is: what is missing, who is still at work."""

from __future__ import annotations

import time

from duat_cli.analysis.progress import Progress
from duat_cli.analysis.shards.folder import Folder, Index
from duat_cli.analysis.shards.ranks import Ranks, owners
from duat_cli.errors import InputError

_NAMED = 3  # ranks in a message


def complete(folder: Folder) -> Index:
    """Of every prompt; InputError says what is missing."""
    index = folder.index()
    if index.found < len(folder.keys):
        raise InputError(missing(folder, index, folder.last_world()))
    return index


def missing(folder: Folder, index: Index, world: int) -> str:
    """Which of so many processes left work undone, and what to do."""
    own, done = [0] * world, [0] * world
    for position, rank in enumerate(owners(folder.keys, folder.leaders, world)):
        own[rank] += 1
        done[rank] += index.has(position)
    living = folder.held(world)
    parts = [
        f"{Ranks(rank, world)}'s shard ends after {done[rank]} of its {own[rank]} prompts"
        + (", still at work" if rank in living else "")
        for rank in range(world)
        if done[rank] < own[rank]
    ]
    more = f", and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    count = len(folder.keys) - index.found
    return f"{folder.path}: {'; '.join(parts[:_NAMED])}{more}; missing {count} prompts: run the same command again"


def await_others(folder: Folder, ranks: Ranks, progress: Progress, until: float) -> None:
    """Until every prompt has a result; InputError names the ranks that have died, or not begun before `until`
    (monotonic seconds)."""
    pause = 0.05  # and then each a fifth longer
    while True:
        living = folder.held(ranks.world)
        if living:
            progress(0, 0, f"waiting for rank {', '.join(map(str, living))} of {ranks.world}")
        else:
            index = folder.index()
            if index.found == len(folder.keys):
                return
            if time.monotonic() > until:
                raise InputError(missing(folder, index, ranks.world))
        time.sleep(pause)
        pause = min(1.2 * pause, 1.0)
