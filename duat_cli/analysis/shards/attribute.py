"""`duat attribute --out`: the results kept of each prompt, and the report on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from duat_cli.analysis.attribute.run import AttributeOptions, Attributor
from duat_cli.analysis.attribute.total import Attributed, AttributeHead, AttributeTotal, Moments, Place, PromptSums
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.analysis.shards.records import Packed, PromptRecord, of_prompt
from duat_cli.analysis.shards.run import Worker, share
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompt_set import PromptSet
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.words import Words
from duat_cli.results.attribute import AttributeReport, Attribution, Continuation
from duat_cli.results.base import Run


class AttributeRecord(PromptRecord):
    """Results of one prompt."""

    attribution: list[Attribution]
    continuation: Continuation | None
    sums: list[tuple[Place, int, tuple[Packed, ...], int | None]]
    """`Moments` of all heads and neurons, with their places; none if there is only one prediction over all prompts."""

    @classmethod
    def of(cls, prompt: Prompt, found: Attributed) -> AttributeRecord:
        return cls(
            **of_prompt(prompt),
            attribution=found.attribution,
            continuation=found.continuation,
            sums=[(place, one.count, one.sums, one.in_expert) for place, one in found.sums.places.items()],
        )

    def found(self) -> Attributed:
        places = {place: Moments(count, sums, inside) for place, count, sums, inside in self.sums}
        return Attributed(self.attribution, self.continuation, PromptSums(torch.float32, places))


def attribute_into(
    path: Path,
    loaded: LoadedModel,
    prompts: PromptSet,
    words: Words,
    options: AttributeOptions,
    max_tokens: int | None,
    ranks: Ranks,
    progress: Progress,
) -> AttributeReport | None:
    """Adds this process's results to the folder. The first rank waits for the others and returns the report on all."""
    session = Session(loaded, progress, cache=False, factors=False)
    each = Attributor(session, words, options, progress, len(prompts.keys))
    folder = share(path, session, prompts, _Worker(each, options, max_tokens), ranks, progress)
    return None if folder is None else merged(folder, session.run_facts, progress)


class _Worker(Worker):
    """The command as a worker for `share`."""

    command = "attribute"

    def __init__(self, each: Attributor, options: AttributeOptions, max_tokens: int | None) -> None:
        self._each, asked = each, options.asked
        targets, againsts = options.each
        self.settings = {
            "target": asked.target,
            "against": asked.against,
            "position": asked.position,
            "first_token": asked.first_token,
            "target_field": None if targets is None else str(targets),  # its name, a hash of the targets
            "against_field": None if againsts is None else str(againsts),
            "steps": options.steps,
            "continuation": options.continuation,
            "measure": options.measure,
            "top": options.top,
            "max_tokens": max_tokens,
        }

    def __call__(self, chunk: Sequence[tuple[int, Prompt]]) -> list[AttributeRecord]:
        """Records of prompts, which come with their positions."""
        found = zip(chunk, self._each(chunk), strict=True)
        return [AttributeRecord.of(prompt, one) for (_, prompt), one in found]

    def facts(self) -> AttributeHead:
        return self._each.head()


def merged(folder: Folder, run: Callable[[], Run], progress: Progress) -> AttributeReport:
    """The report on all prompts. run: is called at the end."""
    index, head = folder.complete(), AttributeHead.model_validate(folder.manifest.facts)
    total = AttributeTotal(cast(int, folder.manifest.settings["top"]))
    for prompt, record in folder.each(index, AttributeRecord, progress):
        total.add(prompt, record.found())
    return total.report(head, run())
