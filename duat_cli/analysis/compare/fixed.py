"""The gain from dynamic parameters: the loss of a model in which H, then also norm scales, then also router weights are
held fixed. Its nonlinearity σ stays live."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from duat_cli.analysis.compare.captured import (
    Captured,
    as_many_tokens,
    capture,
    mean_of,
    of_kinds,
    require_equal,
    require_room,
)
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.causality import HeadTest
from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.instrument.held import HeldRig
from duat_cli.models.sweep.lockstep import Call
from duat_cli.results.compare.report import ComparedPrompt, CompareReport, FixedLoss, FixedParameters
from duat_cli.statistics.bootstrap import FEWEST, paired_interval
from duat_cli.statistics.divergence import mean_loss

Kind = Literal["H", "H and norms", "H, norms and routers"]
HELD: dict[Kind, tuple[str, ...]] = {
    "H": ("attention",),
    "H and norms": ("attention", "norms"),
    "H, norms and routers": ("attention", "norms", "routers"),
}
"""Held parameters, by the names of `Held`."""
Source = Literal["own", "another prompt", "mean"]


def loss_pass(model: Any, ids: Tensor, rig: HeldRig | None = None) -> Call:
    """A pass of the whole model, under `rig` if given, that returns the mean negative log likelihood of its prompt's
    tokens behind the first, in nats."""

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        with torch.no_grad(), contextlib.nullcontext() if rig is None else rig.active():
            yield

    return Call(lambda: mean_loss(run_stack(model, ids).logits[0, :-1], ids[0, 1:]), active)


def fixed(loaded: LoadedModel, prompts: Sequence[Prompt], own: bool, progress: Progress) -> CompareReport:
    """The report. own: whether the prompts are the user's; others are cut to the length of the shortest."""
    prompts = _of_equal_length(prompts, own)
    session = Session(loaded, progress, cache=False)
    require_room("--fixed", session, prompts)
    errors: list[float] = []
    captured = capture(session, prompts, progress, errors=errors)
    progress(0, 0, "the model with its dynamic parameters held")
    found = _losses(session, prompts, captured)
    return CompareReport(
        prompts=[
            ComparedPrompt(sha256=p.sha256, tokens=p.input_ids.shape[1], label=f"prompt {number}")
            for number, p in enumerate(prompts)
        ],
        comparison=None,
        pairs=[],
        fixed=found,
        **session.report_facts(max(errors)),
    )


def _of_equal_length(prompts: Sequence[Prompt], own: bool) -> list[Prompt]:
    counts = sorted({prompt.input_ids.shape[1] for prompt in prompts})
    if len(prompts) < 2:
        raise InputError("--fixed: one prompt has no other whose parameters it could be given; give more prompts")
    if counts[0] < 2:
        raise InputError("--fixed: a prompt of one token has no loss; give longer ones")
    if own:
        require_equal("--fixed", prompts)
    return as_many_tokens(prompts)


def _losses(session: Session, prompts: Sequence[Prompt], captured: list[Captured]) -> FixedParameters:
    model, device, structure = session.loaded.model, session.loaded.device, session.structure
    head = HeadTest(model, structure.stack, device)
    session.together(head.passes)
    why_not = head.why_no_next_token()
    if why_not is not None:
        raise UnsupportedModelError(f"--fixed: {why_not}, so its prompts have no loss")
    mean = {index: mean_of([blocks[index] for blocks in captured]) for index in captured[0]}
    ids = [prompt.input_ids.to(device) for prompt in prompts]
    sources: dict[Source, Callable[[int], Captured]] = {
        "own": lambda number: captured[number],
        "another prompt": lambda number: captured[(number + 1) % len(captured)],
        "mean": lambda _number: mean,
    }
    live = [loss_pass(model, one) for one in ids]
    routed = any(block.routers for block in captured[0].values())
    held = {
        (kind, source): [loss_pass(model, one, _rig(structure, kind, taken(number))) for number, one in enumerate(ids)]
        for kind in list(HELD)[: 3 if routed else 2]
        for source, taken in sources.items()
    }
    session.together([*live, *(one for passes in held.values() for one in passes)])
    base = [one.output for one in live]
    runs = [_loss(kind, source, [one.output for one in passes], base) for (kind, source), passes in held.items()]
    own = [passes for (_, source), passes in held.items() if source == "own"]
    error = max(abs(one.output - b) for passes in own for one, b in zip(passes, base, strict=True))
    tolerance = tolerance_for(model.dtype)
    return FixedParameters(
        tokens=ids[0].shape[1],
        live=fmean(base),
        own_error=error,
        tolerance=tolerance,
        holds=error <= tolerance,
        runs=runs,
    )


def _rig(structure: Any, kind: Kind, blocks: Captured) -> HeldRig:
    parts = [block.parts for block in structure.blocks]
    held = {number: of_kinds(one, HELD[kind]) for number, one in blocks.items()}
    return HeldRig(structure.part, parts, interface=structure.interface, held=held.__getitem__)


def _loss(kind: Any, source: Source, losses: list[float], live: list[float]) -> FixedLoss:
    """The mean loss; null where a prompt has none: values of another prompt can let the stream of a mixer grow without
    limit."""
    lost = sum(not math.isfinite(loss) for loss in losses)
    if lost:
        why = f"the model overflows with these parameters held, for {lost} of {len(losses)} prompts"
        return FixedLoss.explained(why, held=kind, source=source, loss=None, change=None, low=None, high=None)
    interval = paired_interval([loss - base for loss, base in zip(losses, live, strict=True)])
    return FixedLoss.explained(
        f"needs {FEWEST} prompts" if len(live) < FEWEST else "too many prompts differ by the same",
        held=kind,
        source=source,
        loss=fmean(losses),
        change=fmean(losses) - fmean(live),
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
    )
