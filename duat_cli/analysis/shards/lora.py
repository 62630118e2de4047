"""`duat lora-diff --out`: the results kept of each prompt, its test of Eq. 18, and the report on all.

Results that follow from the weights alone are computed by every process, since the tuned model is made from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from duat_cli.analysis.lora.eq18 import INPUTS
from duat_cli.analysis.lora.findings import Findings
from duat_cli.analysis.lora.prompts import Compared
from duat_cli.analysis.lora.report import Pair, whole_report
from duat_cli.analysis.lora.run import Asked
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.analysis.shards.records import Aside, PromptRecord, of_prompt
from duat_cli.analysis.shards.run import Worker, share
from duat_cli.loading.prompt_set import PromptSet
from duat_cli.loading.prompts import Prompt
from duat_cli.results.base import Run
from duat_cli.results.lora import Eq18, LoraReport
from duat_cli.results.prompts import Roll

_EQ18 = "eq18.json"


class LoraRecord(PromptRecord):
    """Results of one prompt."""

    found: Compared
    plain_errors: tuple[float, float]
    """Errors of the process's base and tuned model against those without instruments."""


class Eq18Record(Aside):
    """The test of Eq. 18 on the first prompts of the set."""

    eq18: Eq18 | None


def lora_into(
    path: Path, directions: bool, max_tokens: int | None, ranks: Ranks, progress: Progress, pair: Pair, asked: Asked
) -> LoraReport | None:
    """Adds this process's results to the folder. The first rank waits for the others and returns the report on all."""
    assert isinstance(asked.prompts, PromptSet)
    settings: dict[str, JsonValue] = {"TUNED": pair.digest, "directions": directions, "max_tokens": max_tokens}
    worker = _Worker(pair, asked, asked.prompts, settings, progress)
    folder = share(path, pair.base, asked.prompts, worker, ranks, progress)
    return None if folder is None else merged(folder, asked.run, progress)


class _Worker(Worker):
    """The command as a worker for `share`."""

    command = "lora-diff"

    def __init__(
        self, pair: Pair, asked: Asked, prompts: PromptSet, settings: Mapping[str, JsonValue], progress: Progress
    ) -> None:
        self.settings = settings
        self._pair, self._prompts, self._progress = pair, prompts, progress
        self._compare = pair.comparer(asked.decode, len(prompts.keys), progress)

    def __call__(self, chunk: Sequence[tuple[int, Prompt]]) -> list[LoraRecord]:
        """Records of prompts, which come with their positions."""
        found = self._compare(chunk, self._pair.norms(chunk[0][1]))
        errors = self._pair.base.plain_error, self._pair.tuned.plain_error
        return [
            LoraRecord(**of_prompt(prompt), found=one, plain_errors=errors)
            for (_, prompt), one in zip(chunk, found, strict=True)
        ]

    def facts(self) -> LoraReport:
        return self._pair.head()

    def beside(self, folder: Folder, counts: set[int], ranks: Ranks) -> None:
        """Tests Eq. 18, in the first rank, if it is not tested yet."""
        if ranks.first and folder.aside(_EQ18, Eq18Record) is None:
            prompts = itertools.islice(self._prompts.prompts(lambda position: position < INPUTS), INPUTS)
            self._progress(0, 1, "testing Eq. 18")
            test = self._pair.eq18([prompt for _, prompt in prompts])
            eq18 = None if test is None else test.alone().found()
            folder.put_aside(_EQ18, Eq18Record(eq18=eq18))


def merged(folder: Folder, run: Callable[[], Run], progress: Progress) -> LoraReport:
    """The report on all prompts. run: is called at the end."""
    index, head = folder.complete(), LoraReport.model_validate(folder.manifest.facts)
    tested = folder.kept_aside(_EQ18, Eq18Record, "the test of Eq. 18 is missing")
    found, prompts, plain_errors = Findings(), Roll(), (0.0, 0.0)
    for prompt, record in folder.each(index, LoraRecord, progress):
        found.add(record.found)
        prompts.add(prompt)
        plain_errors = max(plain_errors[0], record.plain_errors[0]), max(plain_errors[1], record.plain_errors[1])
    return whole_report(head, prompts, found, plain_errors, tested.eq18, run())
