"""One process's part of `duat inspect --out`: the prompts that are its own and have no result yet, then their nulls.

Every process runs the set's first prompt, whoever it belongs to: there the model with instruments is compared with the
model without, as in a report of one process, and on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from dataclasses import dataclass
from pathlib import Path

from duat_cli import __version__
from duat_cli.analysis.inspect.run import InspectOptions, chosen, report_head, sweep_prompts
from duat_cli.analysis.inspect.total import PromptSweep
from duat_cli.analysis.inspect.untrained import NullSource, not_run
from duat_cli.analysis.plan.waves import SIDE_BY_SIDE
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.merge import merge, missing
from duat_cli.analysis.shards.ranks import Ranks, owners
from duat_cli.analysis.shards.records import Manifest, PromptRecord, Settings, written
from duat_cli.cache.tensors import gram_key
from duat_cli.errors import DuatError, InputError
from duat_cli.loading.checkpoint.source import tokenizer_files
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompt_set import PromptSet, digest_of
from duat_cli.loading.prompts import Prompt
from duat_cli.results.inspect import InspectReport

GRACE = 60.0  # seconds that the processes of one launch may begin apart


def inspect_into(
    path: Path,
    loaded: LoadedModel,
    prompts: PromptSet,
    options: InspectOptions,
    max_tokens: int | None,
    ranks: Ranks,
    progress: Progress,
) -> InspectReport | None:
    """This process's results into the folder. The first rank waits for the others and returns the report of all."""
    session = Session(loaded, progress, cache=options.cache)
    layers, total = chosen(options.layers, session.depth), len(prompts.keys)
    swept = _Swept(session, options, progress, total)
    _, first = next(prompts.prompts(lambda position: position == 0))
    [sweep] = swept([(0, first)])
    session.save_cache()
    manifest = _manifest(session, prompts, options, layers, max_tokens, max(sweep.errors))
    folder = Folder.open(path, manifest, prompts.keys)
    with folder.shard(ranks) as shard:
        begun = time.monotonic()
        index = folder.index()
        mine = [owner == ranks.rank for owner in owners(prompts.keys, ranks.world)]
        left = [is_mine and not index.has(k) for k, is_mine in enumerate(mine)]
        counts = {n for n, is_mine in zip(index.tokens, mine, strict=True) if n and is_mine}
        for _, prompt in prompts.prompts(left.__getitem__):  # one that cannot be run is said before hours of others
            counts.add(prompt.input_ids.shape[1])
        waiting = prompts.prompts(left.__getitem__)
        while chunk := list(itertools.islice(waiting, 1 if loaded.paged is None else SIDE_BY_SIDE)):
            for (position, prompt), found in zip(chunk, swept(chunk), strict=True):
                record = PromptRecord.of(prompt, found, session.plain_error)
                shard.append(written(folder.seal, position, prompt, record))
        if manifest.has_nulls:
            _fill_nulls(folder, session, options, counts, ranks, progress)
    if not ranks.first:
        return None
    await_others(folder, ranks, progress, begun + GRACE)
    if manifest.has_nulls:
        _fill_nulls(folder, session, options, folder.index().counts(), ranks, progress)
    return merge(folder, session.run_facts, progress)


@dataclass(frozen=True)
class _Swept:
    """Some prompts through the model, with the progress of all."""

    session: Session
    options: InspectOptions
    progress: Progress
    total: int

    def __call__(self, chunk: list[tuple[int, Prompt]]) -> list[PromptSweep]:
        """chunk: prompts with their positions."""
        begun, last = chunk[0][0], chunk[-1][0]

        def progress(done: int, of: int, what: str) -> None:
            passed = begun + (last + 1 - begun) * done / of if of else begun
            self.progress(int(passed), self.total, f"prompt {begun + 1} of {self.total}")

        return sweep_prompts(self.session, [prompt for _, prompt in chunk], self.options, None, progress)


def await_others(folder: Folder, ranks: Ranks, progress: Progress, until: float) -> None:
    """Until every prompt has a result; InputError names the ranks that have died, or not begun before `until`
    (monotonic seconds)."""
    pause = 0.2
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
        pause = min(1.5 * pause, 1.0)


def _manifest(
    session: Session,
    prompts: PromptSet,
    options: InspectOptions,
    layers: list[int],
    max_tokens: int | None,
    error: float,
) -> Manifest:
    loaded, head = session.loaded, report_head(session)
    device = {"device": head.environment.device.partition(":")[0]}  # each process may have a GPU of its own
    tokenizer = hashlib.sha256()
    for file in tokenizer_files(loaded.files.path):
        tokenizer.update(file.name.encode() + b"\0" + file.read_bytes())
    return Manifest(
        duat_version=__version__,
        in_parts=loaded.paged is not None,
        arithmetic=gram_key(session.fingerprint, loaded.model),
        tokenizer=tokenizer.hexdigest(),
        prompts=len(prompts.keys),
        prompt_set=digest_of(prompts.keys),
        settings=Settings(
            layers=layers,
            threshold=options.threshold,
            conv_width=options.conv_width,
            spectrum=options.spectrum,
            terms=options.terms,
            end_to_end=options.end_to_end,
            routing=options.routing,
            per_prompt=options.per_prompt,
            null=options.null,
            max_tokens=max_tokens,
        ),
        head=head.model_copy(update={"environment": head.environment.model_copy(update=device)}),
        certificate=session.certificate(error),
    )


def _fill_nulls(
    folder: Folder, session: Session, options: InspectOptions, counts: set[int], ranks: Ranks, progress: Progress
) -> None:
    """Those that are not there. Every rank has another order, so that they seldom compute the same one."""
    loaded = session.loaded
    source = NullSource(
        loaded.model,
        len(session.structure.calls),
        options.threshold,
        cache=options.cache,
        memory=loaded.memory,
        in_parts=None if loaded.paged is None else loaded,
        expected=[tokens for tokens in counts if folder.null(tokens) is None] if ranks.world == 1 else (),
    )
    for done, tokens in enumerate(random.Random(ranks.rank).sample(sorted(counts), len(counts))):
        if folder.null(tokens) is not None:
            continue
        progress(done, len(counts), f"null: the re-initialised architecture on {tokens} tokens")
        try:
            folder.put_null(tokens, source.numbers(tokens))
        except DuatError as fault:
            folder.put_null(tokens, [], not_run(fault))
            return
