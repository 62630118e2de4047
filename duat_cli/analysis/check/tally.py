"""Sums over predictions: loss, entropy, range, and the most likely tokens with their margins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.errors import needed
from duat_cli.statistics.divergence import by_tokens


@dataclass
class Likely:
    """The tokens to which some prediction gives a probability of at least 1/V."""

    tokens: Tensor | None = None
    """Whether each token is one, (V,); None before the first prediction."""

    def add(self, tokens: Tensor | None) -> None:
        if tokens is not None:
            self.tokens = tokens if self.tokens is None else self.tokens | tokens


class Tally:
    """Sums over predictions, which are added as logits (n, V), n at a time. All sums are in float64."""

    def __init__(self, likely: Likely | None = None, *, classes: bool = False) -> None:
        """likely: that of the tally which will include this one, to share it, as it has the size of the vocabulary;
        classes: whether the predictions are of classes, whose probabilities are kept."""
        self._classes = classes
        self.targets: list[int] = []
        self.losses: list[float] = []  # loss of each target, nats; NaN or infinite if the logits make it so
        self.entropies: list[float] = []
        self.ranges: list[float] = []
        self.tokens: list[int] = []  # the most likely token of each prediction
        self.margins: list[float] = []  # first logit minus the second; for tokens over the logits' standard deviation
        self.probabilities: list[list[float]] = []  # of the classes, for each prediction; NaN where the logits are
        self.largest, self.nonfinite, self.vocabulary = 0.0, 0, 0
        self.likely = likely or Likely()

    def add(self, logits: Tensor, targets: Sequence[int]) -> None:
        """Adds predictions. targets: the true tokens for the first of them; for the others none is known."""
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
        self.tokens += ordered.argmax(dim=-1).tolist()  # the first of equal logits, where topk takes any
        gap = first.values[:, 0] - first.values[:, -1]
        log_p = logits.log_softmax(dim=-1)
        p = log_p.exp()
        if self._classes:  # no division, as for two classes the deviation is always half of the gap
            self.probabilities += p.tolist()
        else:
            rows = (row[keep] for row, keep in zip(logits, finite, strict=True))
            gap /= torch.stack([row.std(correction=0) if len(row) else row.new_zeros(()) for row in rows])
        self.margins += gap.nan_to_num(0.0, 0.0, 0.0).tolist()
        self.entropies += (-torch.where(p == 0, 0.0, p * log_p).sum(dim=-1)).tolist()
        self.likely.add((p >= 1 / self.vocabulary).any(dim=0))
        if len(targets):
            at = torch.tensor(targets, device=logits.device)[:, None]
            self.losses += (-log_p[: len(targets)].gather(1, at)[:, 0]).tolist()

    def include(self, other: Tally) -> None:
        """Appends the predictions of another tally."""
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
        """Mean loss, nats per token; NaN or infinite if the logits make it so, NaN without targets."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else math.nan

    @property
    def never(self) -> float:
        """Share of the vocabulary to which no prediction gives a probability of at least 1/V."""
        return 1 - float(needed(self.likely.tokens).double().mean())


def unigram(targets: Sequence[int], vocabulary: int) -> float:
    """Mean loss of a unigram model of the targets, nats per token: each target is predicted from the counts of the
    others, plus one for every token.

    A target is left out of the counts that predict it, as it would give away the answer: on 20 tokens such counts have
    a loss of 3 nats, whatever the text. So its probability is (c - 1 + 1) / (n - 1 + V).
    """
    counts, room = Counter(targets), len(targets) - 1 + vocabulary
    return math.fsum(count * math.log(room / count) for count in counts.values()) / len(targets)
