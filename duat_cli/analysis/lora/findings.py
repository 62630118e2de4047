"""What all prompts of `duat lora-diff` say together, in constant memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from duat_cli.analysis.aggregate import ExactSum, Mean
from duat_cli.analysis.lora.prompts import ONE_TOKEN, Compared
from duat_cli.results.lora import AnswerChange, AnswersSummary, BlockChange, PromptChange
from duat_cli.results.prompts import LISTED
from duat_cli.statistics.bootstrap import FEWEST
from duat_cli.statistics.survey import quantile

CONFIDENCE = 0.95


class Order:
    """Prompts by how far they moved, in constant memory; of two alike the first of the set goes first."""

    def __init__(self, measure: Callable[[PromptChange], float]) -> None:
        self._measure = measure
        self.most: list[PromptChange] = []
        """As many as a report lists."""
        self.first: PromptChange | None = None
        """Of those that have a KL."""
        self.last: PromptChange | None = None

    def add(self, one: PromptChange) -> None:
        bisect.insort(self.most, one, key=lambda other: -self._measure(other))
        del self.most[LISTED:]
        if one.kl is None:
            return
        if self.first is None or self._measure(one) > self._measure(self.first):
            self.first = one
        if self.last is None or self._measure(one) <= self._measure(self.last):
            self.last = one


class Means:
    """What the prompts so far say together of KL and loss."""

    def __init__(self) -> None:
        self._kl, self._loss, self._squares = ExactSum(), ExactSum(), ExactSum()
        self._no_kl = self._no_loss = False
        self._why: dict[str, str] = {}
        self.seen = self.scored = self.better = 0
        """Prompts; those with a loss; those on which it fell."""

    def add(self, one: PromptChange | AnswerChange) -> None:
        self.seen += 1
        if one.kl is None:
            self._no_kl = True
            self._say("kl", one)
        else:
            self._kl.add(one.kl)
        if ONE_TOKEN in one.reasons.values():
            self._say("loss", one)
        elif one.loss_base is None or one.loss_tuned is None:
            self._no_loss = True
            self._say("loss", one)
        else:
            change = one.loss_tuned - one.loss_base
            self._loss.add(change)
            self._squares.add(change**2)
            self.scored += 1
            self.better += change < 0

    def _say(self, what: str, one: PromptChange | AnswerChange) -> None:
        """The first reason that is not the length of a prompt, else that."""
        for field, why in one.reasons.items():
            if field.startswith(what) and self._why.get(what, ONE_TOKEN) == ONE_TOKEN:
                self._why[what] = why

    @property
    def kl(self) -> float | None:
        return None if self._no_kl else self._kl.mean()

    @property
    def loss(self) -> float | None:
        """Tuned less base, of every prompt but those of one token; None where one of the others has no finite loss."""
        return None if self._no_loss or not self.scored else self._loss.mean()

    @property
    def loss_interval(self) -> tuple[float, float] | None:
        """Student's, 95 %, of the mean over prompts drawn as these are, which two sums are enough for, unlike
        `paired_interval`; None of too few, or too equal ones, to say how they differ."""
        if self.loss is None or self.scored < FEWEST:
            return None
        spread = max(0.0, self._squares.mean() - self.loss**2) / (self.scored - 1)
        if not spread:
            return None
        half = quantile((1 + CONFIDENCE) / 2, self.scored - 1) * spread**0.5
        return self.loss - half, self.loss + half

    @property
    def said(self) -> dict[str, Any]:
        """As fields of a summary."""
        low, high = self.loss_interval or (None, None)
        return {
            "kl": self.kl,
            "loss_change": self.loss,
            "loss_change_low": low,
            "loss_change_high": high,
            "reasons": self.reasons,
        }

    @property
    def reasons(self) -> dict[str, str]:
        absent = {"kl": self.kl, "loss_change": self.loss}
        return {name: self._why[name.partition("_")[0]] for name, value in absent.items() if value is None}


class Findings:
    """Of the prompts so far, in constant memory: their blocks, what the next tokens and the loss did, and in what order
    the prompts moved; apart from it the same of what the model itself says in them."""

    def __init__(self) -> None:
        self._blocks: list[Mean[BlockChange]] = []
        self.base_error = self.tuned_error = 0.0
        self.whole, self.answers = Means(), Means()
        self._by_kl, self._by_output = Order(lambda one: one.kl or 0.0), Order(lambda one: one.output)
        self._tokens = 0

    def add(self, found: Compared) -> None:
        """The next prompt."""
        self._blocks = self._blocks or [Mean() for _ in found.blocks]
        for mean, block in zip(self._blocks, found.blocks, strict=True):
            mean.add(block)
        self.base_error = max(self.base_error, found.base_error)
        self.tuned_error = max(self.tuned_error, found.tuned_error)
        one = found.change
        self.whole.add(one)
        self._by_kl.add(one)
        self._by_output.add(one)
        if one.answer is not None:
            self.answers.add(one.answer)
            self._tokens += one.answer.tokens

    @property
    def blocks(self) -> list[BlockChange]:
        """Means; of certificates the largest."""
        return [mean.value() for mean in self._blocks]

    @property
    def order(self) -> Order:
        """By KL where every prompt has one, else by what the output moved."""
        return self._by_output if self.whole.kl is None else self._by_kl

    @property
    def summary(self) -> AnswersSummary | None:
        """Of the answers; None without one."""
        if not self._tokens:
            return None
        return AnswersSummary(prompts=self.answers.seen, tokens=self._tokens, **self.answers.said)
