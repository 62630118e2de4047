"""Sums over predictions: loss, entropy, range, and the most likely tokens with their margins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.statistics.divergence import by_tokens


@dataclass
class Likely:
    """The tokens that some prediction makes likelier than 1/V."""

    tokens: Tensor | None = None
    """(V,), whether it is one; None before the first prediction."""

    def add(self, tokens: Tensor | None) -> None:
        if tokens is not None:
            self.tokens = tokens if self.tokens is None else self.tokens | tokens


class Tally:
    """Predictions as they come, logits (n, V) of n of them at a time; everything is added up in float64."""

    def __init__(self, likely: Likely | None = None, *, classes: bool = False) -> None:
        """likely: of the tally that will include this one, for one set of them all: it is of vocabulary size; classes:
        whether the predictions are of classes, whose probabilities are kept."""
        self._classes = classes
        self.targets: list[int] = []
        self.losses: list[float] = []  # nats, of each target; NaN or infinite where the logits make it so
        self.entropies: list[float] = []
        self.ranges: list[float] = []
        self.tokens: list[int] = []  # the most likely token of each prediction
        self.margins: list[float] = []  # first logit less the second, of tokens over the standard deviation
        self.probabilities: list[list[float]] = []  # of the classes, for each prediction; NaN where the logits are
        self.largest, self.nonfinite, self.vocabulary = 0.0, 0, 0
        self.likely = likely or Likely()

    def add(self, logits: Tensor, targets: Sequence[int]) -> None:
        """targets: the tokens that the first predictions should have made; those behind them have no known answer."""
        self.vocabulary = logits.shape[-1]
        self.targets += targets
        at = 0
        for piece in by_tokens(logits):
            self._add(piece.double(), targets[at : at + len(piece)])
            at += len(piece)

    def _add(self, logits: Tensor, targets: Sequence[int]) -> None:
        wrong = logits.isnan() | logits.isposinf()
        self.nonfinite += int(wrong.sum())
        finite = logits.isfinite()
        high, low = (logits.where(finite, fill) for fill in (-math.inf, math.inf))
        self.ranges += (high.amax(dim=-1) - low.amin(dim=-1)).tolist()
        self.largest = max(self.largest, float(logits.where(finite, 0.0).abs().max()))
        ordered = logits.nan_to_num(-math.inf, math.inf, -math.inf)
        first = ordered.topk(min(2, logits.shape[-1]), dim=-1)
        self.tokens += ordered.argmax(dim=-1).tolist()  # of equal ones the first; topk takes any
        gap = first.values[:, 0] - first.values[:, -1]
        log_p = logits.log_softmax(dim=-1)
        p = log_p.exp()
        if self._classes:  # of two classes the deviation is half of the gap, however small that is
            self.probabilities += p.tolist()
        else:
            gap /= torch.stack([row[keep].std(correction=0) for row, keep in zip(logits, finite, strict=True)])
        self.margins += gap.nan_to_num(0.0, 0.0, 0.0).tolist()
        self.entropies += (-torch.where(p == 0, 0.0, p * log_p).sum(dim=-1)).tolist()
        self.likely.add((p >= 1 / self.vocabulary).any(dim=0))
        if len(targets):
            at = torch.tensor(targets, device=logits.device)[:, None]
            self.losses += (-log_p[: len(targets)].gather(1, at)[:, 0]).tolist()

    def include(self, other: Tally) -> None:
        """The predictions of another, behind these."""
        self.targets += other.targets
        self.losses += other.losses
        self.entropies += other.entropies
        self.ranges += other.ranges
        self.tokens += other.tokens
        self.margins += other.margins
        self.probabilities += other.probabilities
        self.largest = max(self.largest, other.largest)
        self.nonfinite += other.nonfinite
        self.vocabulary = self.vocabulary or other.vocabulary
        if other.likely is not self.likely:
            self.likely.add(other.likely.tokens)

    @property
    def loss(self) -> float:
        """Mean, nats a token; NaN or infinite as the logits make it."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else math.nan

    @property
    def never(self) -> float:
        """Share of the vocabulary that no prediction makes likelier than the uniform distribution does."""
        assert self.likely.tokens is not None
        return 1 - float(self.likely.tokens.double().mean())


def unigram(targets: Sequence[int], vocabulary: int) -> float:
    """Mean loss of the targets' own counts, nats a token: each is predicted from the others, one added to every count.

    A token is left out of the counts that predict it, for counts that include it would know the answer: on 20 tokens
    they have a loss of 3 nats, whatever the text. So what is left is (c - 1 + 1) / (n - 1 + V).
    """
    counts, room = Counter(targets), len(targets) - 1 + vocabulary
    return math.fsum(count * math.log(room / count) for count in counts.values()) / len(targets)
