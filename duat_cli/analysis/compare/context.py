"""In-context learning (section 4.2 of Wang & Li): the effect of demonstrations in front of a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from duat_cli.analysis.compare.alignment import common_start
from duat_cli.analysis.compare.request import Texts
from duat_cli.analysis.compare.states import BlockState
from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt
from duat_cli.operators.input_change import share_from
from duat_cli.results.base import finite
from duat_cli.results.compare.report import BlockComparison, BlockRead, ContextRead, ContextRun, InContext
from duat_cli.statistics.divergence import mean_loss

NONE_THERE = "no block has one"
IMPOSSIBLE = "infinite: a token of the answer has probability 0"
NO_ROWS = "W' is zero on the question"


@dataclass(frozen=True)
class Answer:
    """The answer's tokens, behind the tokens of one run."""

    ids: Tensor  # (1, N), the answer with everything in front of it
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """The places whose next tokens are the answer's."""
        return slice(self.start - 1, self.stop - 1)

    def loss(self, logits: Tensor) -> float:
        """Mean negative log likelihood, nats. logits: those at `rows`, (tokens, vocabulary)."""
        return mean_loss(logits, self.ids[0, self.start : self.stop])


class Context:
    """Places of question, demonstrations and answer in every run, and how much of them the blocks read."""

    def __init__(self, texts: Texts, prompts: Sequence[Prompt], question: int, special: frozenset[int]) -> None:
        """question: how many tokens at the end of every run are the question."""
        self._labels = [text.where for text in texts.texts[: texts.runs]]
        ids: list[list[int]] = [prompt.input_ids[0].tolist() for prompt in prompts]
        self.question, self._ids = question, ids[: texts.runs]
        self.answers = [_answer(ids[run], prompts[number], special) for run, number in enumerate(texts.answered)]
        self._places = {
            run: [
                _place(ids[run], None if front is None else ids[front], ids[end], len(ids[run]) - question, special)
                for front, end in parts
            ]
            for run, parts in texts.demonstrations.items()
        }
        self._reads: dict[tuple[int, int], list[BlockRead]] = {}  # by run and block

    def see(self, run: int, state: BlockState) -> None:
        """Takes one block under one run."""
        rows = torch.arange(len(self._ids[run]) - self.question, len(self._ids[run]))
        self._reads[run, state.index] = [_read(state, rows, places) for places in self._places.get(run, [])]

    def report(
        self, logits: Sequence[Tensor] | str, changes: Sequence[Sequence[BlockComparison]], layers: Sequence[int]
    ) -> InContext:
        """The report. logits: those at every answer's `rows`, (tokens, vocabulary), or why there are none; changes: for
        every run but the first, its comparison with the first, by block."""
        losses, why_not = _losses(self.answers, logits)
        runs = []
        for run, label in enumerate(self._labels):
            moved = [block.bias for block in changes[run - 1]] if run else [0.0]
            bias = [change for change in moved if change is not None]
            one, first = losses[run], losses[0]
            runs.append(
                ContextRun.explained(
                    NONE_THERE,
                    {"loss": why_not[run], "loss_change": why_not[run] or why_not[0]},
                    prompt=run,
                    label=label,
                    loss=one,
                    loss_change=None if one is None or first is None else one - first,
                    bias=fmean(bias) if bias else None,
                    reads=self._reads_of(run, layers),
                )
            )
        return InContext(
            question_tokens=self.question, answer_tokens=self.answers[0].stop - self.answers[0].start, runs=runs
        )

    def _reads_of(self, run: int, layers: Sequence[int]) -> list[ContextRead]:
        several = len(self._places.get(run, [])) > 1
        found = []
        for place, tokens in enumerate(self._places.get(run, [])):
            blocks = [self._reads[run, index][place] for index in layers]
            known = [block for block in blocks if block.share is not None and block.null is not None]
            values = {name: fmean(getattr(b, name) for b in known) if known else None for name in ("share", "null")}
            found.append(
                ContextRead.explained(
                    NONE_THERE,
                    demonstration=place + 1 if several else run,
                    tokens=len(tokens),
                    blocks=blocks,
                    **values,
                )
            )
        return found


def _read(state: BlockState, rows: Tensor, places: Tensor) -> BlockRead:
    operator = state.operator
    if isinstance(operator, str):
        return BlockRead.absent(operator, index=state.index)
    both = {"share": operator.routed, "null": operator.uniform}
    values = {name: share_from(one, rows, places, operator.gram)[0] for name, one in both.items()}
    return BlockRead.explained(NO_ROWS, index=state.index, **values)


def _answer(run: list[int], answered: Prompt, special: frozenset[int]) -> Answer:
    ids: list[int] = answered.input_ids[0].tolist()
    start, stop = common_start(run, ids), len(ids)
    while stop and ids[stop - 1] in special:  # what a tokenizer puts behind every text
        stop -= 1
    if not 0 < start < stop:
        raise InputError("--answer: the tokenizer makes no token of its own of it behind the question")
    return Answer(answered.input_ids, start, stop)


def _place(run: list[int], front: list[int] | None, whole: list[int], stop: int, special: frozenset[int]) -> Tensor:
    """The places of one demonstration's tokens. front: ids of the text that ends in front of it; whole: ids of the text
    that ends with it; stop: where the question begins."""
    first = next((place for place, token in enumerate(run) if token not in special), 0)
    if front is not None:
        first = max(first, common_start(front, run))
    return torch.arange(first, max(first, min(common_start(whole, run), stop)))


def _losses(answers: Sequence[Answer], logits: Sequence[Tensor] | str) -> tuple[list[float | None], list[str]]:
    """Loss of every run, or None, and why there is none."""
    if isinstance(logits, str):
        return [None] * len(answers), [logits] * len(answers)
    found = [finite(answer.loss(rows)) for answer, rows in zip(answers, logits, strict=True)]
    return found, [IMPOSSIBLE if loss is None else "" for loss in found]
