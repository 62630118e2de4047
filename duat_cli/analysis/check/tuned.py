"""The loss of a model with an adapter applied, on what its base was asked."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.check.behaviour import Asking, Question
from duat_cli.analysis.lora.applied import adapted
from duat_cli.analysis.opening import Found
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.sweep.lockstep import forwards
from duat_cli.results.behaviour import NOT_FINITE, TunedBehaviour
from duat_cli.statistics.divergence import by_tokens


def tuned_behaviour(adapter: AdapterFiles, found: Found, loaded: LoadedModel, asking: Asking) -> TunedBehaviour:
    """Of the base `loaded`, which `asking` went through, with that adapter."""
    asked = [question for question in asking.questions if question.targets]
    if not asked:
        return TunedBehaviour.absent("the model predicts no tokens")
    try:
        with adapted(loaded, adapter, BaseWeights(found.place, found.files)) as tuned:
            calls = [functools.partial(_losses, tuned.model, question, tuned.device) for question in asked]
            parts = forwards(None if tuned.paged is None else tuned.paged.pager, calls)
    except UnsupportedModelError as fault:
        return TunedBehaviour.absent(str(fault))
    losses = [loss for part in parts for loss in part]
    mean = math.fsum(losses) / len(losses)
    return TunedBehaviour(loss_per_token=mean) if math.isfinite(mean) else TunedBehaviour.absent(NOT_FINITE)


def _losses(model: Any, question: Question, device: str) -> list[float]:
    """Of every target, nats."""
    logits: Tensor = run_stack(model, question.ids.to(device)).logits[0][list(question.at)[: len(question.targets)]]
    targets = torch.tensor(question.targets, device=logits.device).split(len(by_tokens(logits)[0]))
    found: list[float] = []
    for piece, target in zip(by_tokens(logits), targets, strict=True):
        found += torch.nn.functional.cross_entropy(piece.double(), target, reduction="none").tolist()
    return found
