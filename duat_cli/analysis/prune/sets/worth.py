"""Comparison of a written checkpoint with the model it was made from: parameters, bytes, damage, perplexity, time."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from duat_cli.analysis.prune.sets.apply import Applied
from duat_cli.analysis.prune.sets.size import parameter_count
from duat_cli.analysis.prune.terms.damage import Loss, Metric, last_states
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.causality import by_row, head_output
from duat_cli.models.discovery.modality import Given, decoder_of, for_decoder, part_reading, placed, stack_of
from duat_cli.models.discovery.structure import run_stack
from duat_cli.results.prune.written import Written

NO_TOKENS = "no prompt has a next token to predict"
RUNS = 7
LARGEST_LOSS = 700.0  # nats per token; float64 holds its exponential
_PERPLEXITIES = ("perplexity_before", "perplexity_after")
TIMED_TOKENS = 512
"""Tokens of one timed run, about: prompts are taken as long as they fit."""


def worth(
    loaded: LoadedModel,
    applied: Applied,
    directory: Path,
    held_out: Sequence[Prompt],
    prompts: Sequence[Prompt],
    *,
    metric: Metric,
    budget: float,
    kind: str,
    terms: int,
    repaired: bool,
    no_loss: str | None,
) -> Written:
    """The comparison for the checkpoint in `directory`, which is read once more. metric: of the damage that the budget
    is for; no_loss: why the model has no perplexity, if it has none."""
    again = load(str(directory), dtype=str(loaded.model.dtype).removeprefix("torch."), device=str(loaded.model.device))
    on: Literal["held out", "chose the set"] = "held out" if held_out else "chose the set"
    run = held_out or prompts
    given = [placed(prompt.given, loaded.model.device, loaded.model.dtype) for prompt in run]
    if no_loss:
        scored = sum(prompt.input_ids.shape[1] - 1 for prompt in run)
    else:
        scored = sum(map(Loss(loaded.headed).count, given))
    why = no_loss or (None if scored else NO_TOKENS)
    losses = [None if why else _loss(model, given) for model in (loaded.headed, again.model)]
    reasons = {name: why or _large(loss) for name, loss in zip(_PERPLEXITIES, losses, strict=True)}
    damages = _damages(metric, loaded.headed, again.model, given)
    mean = sum(damages) / len(damages)
    if not math.isfinite(mean):
        reasons["damage"] = "it is not finite under some prompt"
    timed = given[: _some([prompt.input_ids.shape[1] for prompt in run])]
    seconds = _timed([_runs(model, timed) for model in (loaded.headed, again.model)], str(loaded.model.device))
    tokens = sum(prompt.input_ids.shape[1] for prompt in run[: len(timed)])
    return Written(
        granularity=kind,
        terms=terms,
        repaired=repaired,
        **asdict(applied),
        parameters_before=parameter_count(loaded.headed),
        parameters_after=parameter_count(again.model),
        measured_on=on,
        prompts=len(run),
        tokens=scored,
        damage=mean if math.isfinite(mean) else None,
        exceeded=sum(not damage <= budget for damage in damages),
        perplexity_before=_exp(losses[0]),
        perplexity_after=_exp(losses[1]),
        seconds_before=seconds[0] / tokens,
        seconds_after=seconds[1] / tokens,
        timed_runs=RUNS,
        timed_tokens=tokens,
        reasons={name: reason for name, reason in reasons.items() if reason},
    )


@torch.no_grad()
def _loss(model: Any, given: Sequence[Given]) -> float:
    """Mean loss in nats per token, over all tokens that have a next one."""
    loss, total, count = Loss(model), 0.0, 0
    for one in given:
        if tokens := loss.count(one):
            total += loss.loss(head_output(model, one), one) * tokens
            count += tokens
    return total / count


@torch.no_grad()
def _damages(metric: Metric, model: Any, other: Any, given: Sequence[Given]) -> list[float]:
    """How far the other model's output is from the model's, for each prompt."""

    def output(one: Any, prompt: Given) -> Tensor:
        if metric.name == "hidden":
            stack = stack_of(decoder_of(one) if for_decoder(prompt) else one)
            return last_states(run_stack(stack, prompt), stack)
        return by_row(head_output(one, prompt))

    return [metric.measured(output(model, prompt), output(other, prompt), prompt) for prompt in given]


def _exp(loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and _large(loss) is None else None


def _large(loss: float | None) -> str | None:
    """Why a loss has no perplexity; None where it has one, or where there is no loss."""
    if loss is None or loss <= LARGEST_LOSS:
        return None
    return "its loss is not finite" if not math.isfinite(loss) else f"e to the loss of {loss:.3g} nats is no number"


def _some(tokens: Sequence[int]) -> int:
    """How many of the first prompts fit into a timed run; at least one. tokens: of each prompt."""
    sums = itertools.accumulate(tokens)
    return max(1, sum(total <= TIMED_TOKENS for total in sums))


def _runs(model: Any, given: Sequence[Given]) -> Callable[[], None]:
    """A timed run over the prompts; of an encoder-decoder only the stack runs that was pruned."""
    stack = part_reading(model, given[0])

    def run() -> None:
        for one in given:
            run_stack(stack, one)

    return run


@torch.no_grad()
def _timed(runs: Sequence[Callable[[], None]], device: str) -> list[float]:
    """The median time of each run, in seconds. The order alternates between rounds, and the first round is dropped."""
    found: list[list[float]] = [[] for _ in runs]
    wait: Callable[[], Any] = torch.cuda.synchronize if device.startswith("cuda") else contextlib.nullcontext
    for turn in range(RUNS + 1):
        order = range(len(runs)) if turn % 2 else reversed(range(len(runs)))
        for number in order:
            wait()
            start = time.perf_counter()
            runs[number]()
            wait()
            found[number].append(time.perf_counter() - start)
    return [statistics.median(times[1:]) for times in found]
