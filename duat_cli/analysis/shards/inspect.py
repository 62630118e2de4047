"""`duat inspect --out`: the results kept of each prompt, its nulls by count of tokens, and the report from both."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from duat_cli.analysis.inspect.batch import leaders_of
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import chosen, report_head
from duat_cli.analysis.inspect.sweep import sweep_together
from duat_cli.analysis.inspect.total import InspectHead, InspectTotal, PromptSweep
from duat_cli.analysis.inspect.untrained import BlockNull, NullSource, Untrained, not_run, with_untrained
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.analysis.shards.records import Aside, PromptRecord, of_prompt
from duat_cli.analysis.shards.run import Together, Worker, share
from duat_cli.errors import DuatError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompt_set import PromptSet
from duat_cli.loading.prompts import Prompt
from duat_cli.models.budgets import most_together
from duat_cli.results.base import Run
from duat_cli.results.inspect import InspectReport


class InspectRecord(PromptRecord):
    """Results of one prompt."""

    found: PromptSweep
    plain_error: float
    """Error of the process's model against the one without instruments."""


class NullRecord(Aside):
    """The null of the re-initialised architecture under one count of tokens."""

    found: list[BlockNull] | str
    """By block, or the reason why there is none."""


def inspect_into(
    path: Path,
    loaded: LoadedModel,
    prompts: PromptSet,
    options: InspectOptions,
    max_tokens: int | None,
    ranks: Ranks,
    progress: Progress,
) -> InspectReport | None:
    """Adds this process's results to the folder. The first rank waits for the others and returns the report on all."""
    session = Session(loaded, progress, cache=options.cache)
    worker = _Worker(session, options, max_tokens, progress, len(prompts.keys))
    folder = share(path, session, prompts, worker, ranks, progress)
    return None if folder is None else merged(folder, session.run_facts, progress)


class _Worker(Worker):
    """The command as a worker for `share`."""

    command = "inspect"

    def __init__(
        self, session: Session, options: InspectOptions, max_tokens: int | None, progress: Progress, total: int
    ) -> None:
        self._session, self._options, self._progress, self._total = session, options, progress, total
        given = vars(options) | {"layers": chosen(options.layers, session.depth), "max_tokens": max_tokens}
        self.settings = {name: value for name, value in given.items() if name != "cache"}  # which changes no number

    def begin(self, first: Prompt, /, *, own: bool) -> Sequence[PromptRecord]:
        """Record of the first prompt, if it is this process's own. For another's prompt, the comparison with the model
        without instruments is enough."""
        if own:
            return self([(0, first)])
        self._session.sweep(first, lambda _run: None)
        return ()

    def together(self) -> Together | None:
        """Batches of prompts with equally many tokens, if there are enough prompts."""
        enough = most_together(self._total) > 1 and self._session.loaded.paged is None
        return functools.partial(leaders_of, self._session, self._options) if enough else None

    def __call__(self, chunk: Sequence[tuple[int, Prompt]]) -> list[PromptRecord]:
        """Records of prompts, which come with their positions; progress is shown over all prompts."""
        begun, last, session = chunk[0][0], chunk[-1][0], self._session
        batch = session.loaded.paged is None and len(chunk) > 1
        begun = last if batch else begun  # a batch runs when its last prompt has been read
        prompts, progress = [prompt for _, prompt in chunk], self._within(begun, last + 1)
        found = sweep_together(session, prompts, self._options, progress)
        error = session.plain_error
        return [
            InspectRecord(**of_prompt(prompt), found=one, plain_error=error)
            for prompt, one in zip(prompts, found, strict=True)
        ]

    def _within(self, begun: int, end: int) -> Progress:
        """Progress of the prompts from position `begun` up to `end`, shown as progress of all prompts."""

        def progress(done: int, of: int, what: str) -> None:
            passed = begun + (end - begun) * done / of if of else begun
            self._progress(int(passed), self._total, f"prompt {begun + 1} of {self._total}")

        return progress

    def facts(self) -> InspectHead:
        return report_head(self._session)

    def beside(self, folder: Folder, counts: set[int], ranks: Ranks) -> None:
        """Computes the nulls that are missing. By now all Gram matrices are known."""
        self._session.save_cache()
        if self._options.null == "all":
            _fill_nulls(folder, self._session, self._options, counts, ranks, self._progress)


def merged(folder: Folder, run: Callable[[], Run], progress: Progress) -> InspectReport:
    """The report on all prompts. run: is called at the end."""
    index, head = folder.complete(), InspectHead.model_validate(folder.manifest.facts)
    settings: Mapping[str, Any] = folder.manifest.settings
    known = _untrained(folder, index.counts()) if settings["null"] == "all" else None
    total = InspectTotal(settings["layers"], settings["terms"], settings["per_prompt"])
    plain_error = 0.0
    for prompt, record in folder.each(index, InspectRecord, progress):
        plain_error = max(plain_error, record.plain_error)
        total.add(prompt, with_untrained(record.found, prompt.tokens, known))
    return total.report(head, plain_error, run())


# -- nulls ---------------------------------------------------------------------------------------------------


def null_of(folder: Folder, tokens: int) -> NullRecord | None:
    """The null for a count of tokens; None where there is none yet."""
    return folder.aside(f"null-{tokens}.json", NullRecord)


def put_null(folder: Folder, tokens: int, found: list[BlockNull] | str) -> None:
    """Writes a null, whole or not at all."""
    folder.put_aside(f"null-{tokens}.json", NullRecord(found=found))


def _untrained(folder: Folder, counts: set[int]) -> Untrained:
    """The nulls for a report. As in a report of one process, there are none if one count of tokens has failed."""

    def known(tokens: int) -> list[BlockNull] | str:
        return folder.kept_aside(f"null-{tokens}.json", NullRecord, f"the null of {tokens} tokens is missing").found

    reason = next((null for tokens in sorted(counts) if isinstance(null := known(tokens), str)), None)
    return functools.lru_cache(maxsize=32)(known) if reason is None else lambda _tokens: reason


def _fill_nulls(
    folder: Folder, session: Session, options: InspectOptions, counts: set[int], ranks: Ranks, progress: Progress
) -> None:
    """Computes the missing nulls. Every rank goes in another order, so that two seldom compute the same one."""
    source = NullSource(
        session.loaded,
        len(session.structure.calls),
        options.threshold,
        cache=options.cache,
        expected=[tokens for tokens in counts if null_of(folder, tokens) is None] if ranks.world == 1 else (),
    )
    for done, tokens in enumerate(random.Random(ranks.rank).sample(sorted(counts), len(counts))):
        if null_of(folder, tokens) is not None:
            continue
        progress(done, len(counts), f"null: the re-initialised architecture on {tokens} tokens")
        try:
            put_null(folder, tokens, source.numbers(tokens))
        except DuatError as fault:
            put_null(folder, tokens, not_run(fault))
            return
