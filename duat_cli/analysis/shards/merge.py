"""The report of a folder of results: the same to the last bit, whoever computed what in which order."""

from __future__ import annotations

import functools
from collections.abc import Callable

from duat_cli.analysis.inspect.total import InspectTotal
from duat_cli.analysis.inspect.untrained import Untrained, with_untrained
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.shards.folder import Folder, Index
from duat_cli.analysis.shards.ranks import Ranks, owners
from duat_cli.analysis.shards.records import NullRecord, PromptRecord
from duat_cli.errors import InputError
from duat_cli.results.base import PromptFacts, Run
from duat_cli.results.inspect import InspectReport

_NAMED = 3  # ranks in a message


def merge(folder: Folder, run: Callable[[], Run], progress: Progress) -> InspectReport:
    """The report of all prompts; InputError says what is missing. run: asked for at the end."""
    index, settings = folder.index(), folder.manifest.settings
    if index.found < len(folder.keys):
        raise InputError(missing(folder, index, folder.last_world()))
    known = _untrained(folder, index.counts()) if folder.manifest.has_nulls else None
    total = InspectTotal(settings.layers, settings.terms, settings.per_prompt)
    error = plain_error = 0.0
    for done, line in enumerate(folder.lines(index), 1):
        record = PromptRecord.model_validate_json(line.record)
        sweep = record.sweep()
        error, plain_error = max(error, record.error), max(plain_error, record.plain_error)
        if known is not None:
            sweep = with_untrained(sweep, line.tokens, known)
        total.add(PromptFacts(sha256=line.sha256, tokens=line.tokens), sweep)
        progress(done, index.found, "adding up the prompts")
    seen = folder.manifest.certificate
    exact = max(error, plain_error) <= seen.tolerance
    certificate = seen.model_copy(update={"relative_error": error, "plain_error": plain_error, "exact": exact})
    return total.report(folder.manifest.head, certificate, run())


def missing(folder: Folder, index: Index, world: int) -> str:
    """Which of so many processes left work undone, and what to do."""
    own, done = [0] * world, [0] * world
    for position, rank in enumerate(owners(folder.keys, world)):
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


def _untrained(folder: Folder, counts: set[int]) -> Untrained:
    """As in a report of one process: where one count has failed, none has a null."""
    reason = next((null.reason for tokens in sorted(counts) if (null := _null(folder, tokens)).reason), None)
    if reason is not None:
        return Untrained(lambda tokens: None, reason)
    return Untrained(functools.lru_cache(maxsize=32)(lambda tokens: _null(folder, tokens).blocks), "")


def _null(folder: Folder, tokens: int) -> NullRecord:
    found = folder.null(tokens)
    if found is None:
        raise InputError(f"{folder.path}: the null of {tokens} tokens is missing: run the same command again")
    return found
