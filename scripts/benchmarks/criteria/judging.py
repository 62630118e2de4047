"""How far a pruned model is from the whole one on windows of text: divergence or change of hidden states, and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

AT_ONCE = 16  # windows


@dataclass(frozen=True)
class Judged:
    """Of every window, float64."""

    damage: Tensor
    """Mean KL(whole || pruned) of the next-token distribution, nats a token; without an LM head
    |change of the last hidden states| / |last hidden states|."""
    loss: Tensor | None
    """Mean next-token loss, nats a token; None without an LM head."""

    @property
    def perplexity(self) -> float:
        assert self.loss is not None
        return float(self.loss.mean().exp())


class Judge:
    """Holds what the whole model gives for the windows."""

    def __init__(self, model: Any, windows: Tensor) -> None:
        self._model, self._windows = model, windows
        self.language = hasattr(model, "lm_head")
        self._whole = self.outputs(model)
        self.dense = self.of(self._whole)

    @torch.no_grad()
    def outputs(self, model: Callable[..., Any]) -> Tensor:
        """Logits (windows, tokens, vocabulary), or hidden states (windows, tokens, hidden size)."""
        found = [model(input_ids=ids) for ids in self._windows.split(AT_ONCE)]
        return torch.cat([one.logits if self.language else one.last_hidden_state for one in found])

    def now(self) -> Judged:
        """The model as it is now."""
        return self.of(self.outputs(self._model))

    def of(self, outputs: Tensor) -> Judged:
        """A model that gives these outputs."""
        pairs = zip(self._whole, outputs, self._windows, strict=True)
        rows = [self._window(whole.double(), now.double(), ids) for whole, now, ids in pairs]
        damage, loss = torch.stack(rows).T
        return Judged(damage, loss if self.language else None)

    def _window(self, whole: Tensor, now: Tensor, ids: Tensor) -> Tensor:
        if not self.language:
            return torch.stack([(now - whole).norm() / whole.norm(), torch.zeros((), dtype=torch.float64)])
        target, found = whole.log_softmax(dim=-1), now.log_softmax(dim=-1)
        divergence = functional.kl_div(found, target, reduction="batchmean", log_target=True)
        return torch.stack([divergence, functional.nll_loss(found[:-1], ids[1:])])
