"""Results of `duat lora-diff` over all prompts, in constant memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from duat_cli.analysis.aggregate import ExactSum, Mean
from duat_cli.analysis.lora.prediction import ONE_TOKEN
from duat_cli.analysis.lora.prompts import Compared
from duat_cli.results.lora import AnswerChange, AnswersSummary, BlockChange, PromptChange
from duat_cli.results.prompts import LISTED
from duat_cli.statistics.bootstrap import FEWEST
from duat_cli.statistics.survey import quantile

CONFIDENCE = 0.95


class Order:
    """Prompts ordered by how far they moved, in constant memory; of two that moved as far, the one read first is
    first."""

    def __init__(self, measure: Callable[[PromptChange], float]) -> None:
        self._measure = measure
        self.most: list[PromptChange] = []
        """The prompts that moved most, as many as a report lists."""
        self.first: PromptChange | None = None
        """The prompt that moved most of those that have a KL; `last` is the one that moved least."""
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
    """Means of KL and loss over the prompts so far."""

    def __init__(self) -> None:
        self._kl, self._loss, self._squares = ExactSum(), ExactSum(), ExactSum()
        self._no_kl = self._no_loss = False
        self._why: dict[str, str] = {}
        self.seen = self.scored = self.better = 0
        """How many prompts there were, how many had a loss, and on how many it fell."""

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
        """Keeps the first reason that is not the length of a prompt; that one only where there is no other."""
        for field, why in one.reasons.items():
            if field.startswith(what) and self._why.get(what, ONE_TOKEN) == ONE_TOKEN:
                self._why[what] = why

    @property
    def kl(self) -> float | None:
        return None if self._no_kl else self._kl.mean()

    @property
    def loss(self) -> float | None:
        """Mean of the tuned loss less the base's, over all prompts of more than one token; None where one of them has
        no finite loss."""
        return None if self._no_loss or not self.scored else self._loss.mean()

    @property
    def loss_interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean over prompts drawn as these are. Two running sums are enough for it,
        unlike for `paired_interval`. None where the prompts are too few, or do not differ."""
        if self.loss is None or self.scored < FEWEST:
            return None
        spread = max(0.0, self._squares.mean() - self.loss**2) / (self.scored - 1)
        if not spread:
            return None
        half = quantile((1 + CONFIDENCE) / 2, self.scored - 1) * spread**0.5
        return self.loss - half, self.loss + half

    @property
    def said(self) -> dict[str, Any]:
        """The means as fields of a summary."""
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
        found = {name: self._why[name.partition("_")[0]] for name, value in absent.items() if value is None}
        if self.loss_interval is None:
            few = f"fewer than {FEWEST} prompts" if self.scored < FEWEST else "the loss changes as much on every prompt"
            found |= dict.fromkeys(("loss_change_low", "loss_change_high"), found.get("loss_change", few))
        return found


class Findings:
    """Results over the prompts so far, in constant memory: their blocks, the changes of next tokens and loss, and the
    order of the prompts by how far they moved. `answers` has KL and loss on the model's own messages alone."""

    def __init__(self) -> None:
        self._blocks: list[Mean[BlockChange]] = []
        self.base_error = self.tuned_error = 0.0
        self.whole, self.answers = Means(), Means()
        self._by_kl, self._by_output = Order(lambda one: one.kl or 0.0), Order(lambda one: one.output)
        self._tokens = 0

    def add(self, found: Compared) -> None:
        """Takes the next prompt."""
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
        """Each block's changes, as means over the prompts; of certificates the largest."""
        return [mean.value() for mean in self._blocks]

    @property
    def order(self) -> Order:
        """The prompts ordered by KL where every prompt has one, else by how far the output moved."""
        return self._by_output if self.whole.kl is None else self._by_kl

    @property
    def summary(self) -> AnswersSummary | None:
        """Summary of the answers; None where no prompt has one."""
        if not self._tokens:
            return None
        return AnswersSummary(prompts=self.answers.seen, tokens=self._tokens, **self.answers.said)
