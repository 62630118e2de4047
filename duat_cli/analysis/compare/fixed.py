"""What dynamic parameters buy: the loss of a model whose H, then scales of norms, then router weights are held; its σ
stays live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.progress import Progress, ticker
from duat_cli.analysis.session import Listener, Session
from duat_cli.compat.transformers import stated
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.block.norms import FrozenNorm
from duat_cli.models.discovery.causality import HeadTest
from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.instrument.held import Held, HeldRig
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.routers import Routed, Routers, mean_routed
from duat_cli.models.sweep.lockstep import Call
from duat_cli.models.value_path.operator import whole_rows
from duat_cli.results.compare import ComparedPrompt, CompareReport, FixedLoss, FixedParameters
from duat_cli.statistics.bootstrap import FEWEST, paired_interval
from duat_cli.statistics.divergence import mean_loss

KEPT_BYTES = 4 << 30  # attention matrices of all prompts
Kind = Literal["H", "H and norms", "H, norms and routers"]
KINDS: tuple[Kind, ...] = ("H", "H and norms", "H, norms and routers")
Source = Literal["own", "another prompt", "mean"]


@dataclass(frozen=True)
class Captured:
    """The dynamic parameters of one block call under one prompt, or their mean."""

    attention: list[Tensor]  # (heads, N, N) of each attention call
    norms: dict[nn.Module, list[FrozenNorm]]
    routers: dict[nn.Module, Routed] = field(default_factory=dict)

    def held(self, kind: str) -> Held:
        norms = {} if kind == "H" else self.norms
        return Held([StoredRows(H) for H in self.attention], norms, self.routers if kind == KINDS[2] else {})


def loss_pass(model: Any, ids: Tensor, rig: HeldRig | None = None) -> Call:
    """A pass of the whole model, under instruments or none, for the mean negative log likelihood of its prompt's tokens
    behind the first, nats."""

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        with torch.no_grad(), contextlib.nullcontext() if rig is None else rig.active():
            yield

    return Call(lambda: mean_loss(run_stack(model, ids).logits[0, :-1], ids[0, 1:]), active)


def fixed(loaded: LoadedModel, prompts: Sequence[Prompt], own: bool, progress: Progress) -> CompareReport:
    """The report. own: whether the prompts are the user's; bundled ones are cut to the length of the shortest."""
    prompts = _of_equal_length(prompts, own)
    session = Session(loaded, progress, cache=False)
    _require_room(session, prompts)
    errors: list[float] = []
    captured = _captured(session, prompts, errors, progress)
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
    if len(counts) > 1 and own:
        raise InputError(
            f"--fixed: prompts of {', '.join(map(str, counts[:4]))}{', ...' if len(counts) > 4 else ''} tokens; one is "
            f"given the attention weights of another, so they must be of equal length: use --max-tokens {counts[0]}"
        )
    return [replace(prompt, input_ids=prompt.input_ids[:, : counts[0]]) for prompt in prompts]


def _require_room(session: Session, prompts: Sequence[Prompt]) -> None:
    tokens = prompts[0].input_ids.shape[1]
    heads = stated(session.loaded.model.config, "num_attention_heads") or 1
    size = (len(prompts) + 1) * session.depth * heads * tokens**2 * 4
    if size > KEPT_BYTES:
        raise InputError(
            f"--fixed: attention matrices of {len(prompts)} prompts of {tokens} tokens take {size >> 20} MiB, more "
            f"than {KEPT_BYTES >> 20}; use fewer prompts or --max-tokens"
        )


def _captured(
    session: Session, prompts: Sequence[Prompt], errors: list[float], progress: Progress
) -> list[dict[int, Captured]]:
    """By prompt and block call."""
    found: list[dict[int, Captured]] = [{} for _ in prompts]
    tick = ticker(progress, session.depth, len(prompts))
    routers = Routers()

    def listener(number: int) -> Listener:
        decomposition = Decomposition()

        def listen(run: BlockRun) -> None:
            routed = routers.inside(run.parts.module)  # before replays
            errors.append(decomposition.advance(run).terms.error)
            rows = [whole_rows(call.rows) for call in run.attention]
            found[number][run.index] = Captured(rows, dict(run.recording.norms), routed)
            tick(number)

        return listen

    with routers.seen(session.loaded.model):
        session.sweep_all(prompts, listener)
    return found


def _mean(blocks: Sequence[Captured]) -> Captured:
    """Of one block call over the prompts."""
    attention = [torch.stack(same).mean(dim=0) for same in zip(*(block.attention for block in blocks), strict=True)]
    norms = {}
    for norm, first in blocks[0].norms.items():
        scales = zip(*([one.scale for one in block.norms[norm]] for block in blocks), strict=True)
        norms[norm] = [
            FrozenNorm(one.form, torch.stack(same).mean(dim=0)) for one, same in zip(first, scales, strict=True)
        ]
    routers = {module: mean_routed([block.routers[module] for block in blocks]) for module in blocks[0].routers}
    return Captured(attention, norms, routers)


def _losses(session: Session, prompts: Sequence[Prompt], captured: list[dict[int, Captured]]) -> FixedParameters:
    model, device, structure = session.loaded.model, session.loaded.device, session.structure
    head = HeadTest(model, structure.stack, device)
    session.together(head.passes)
    why_not = head.why_no_next_token()
    if why_not is not None:
        raise UnsupportedModelError(f"--fixed: {why_not}, so its prompts have no loss")
    mean = {index: _mean([blocks[index] for blocks in captured]) for index in captured[0]}
    ids = [prompt.input_ids.to(device) for prompt in prompts]
    sources: dict[Source, Callable[[int], dict[int, Captured]]] = {
        "own": lambda number: captured[number],
        "another prompt": lambda number: captured[(number + 1) % len(captured)],
        "mean": lambda _number: mean,
    }
    live = [loss_pass(model, one) for one in ids]
    routed = any(block.routers for block in captured[0].values())
    held = {
        (kind, source): [loss_pass(model, one, _rig(structure, kind, taken(number))) for number, one in enumerate(ids)]
        for kind in (KINDS if routed else KINDS[:2])
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


def _rig(structure: Any, kind: str, blocks: dict[int, Captured]) -> HeldRig:
    parts = [block.parts for block in structure.blocks]
    return HeldRig(structure.part, parts, interface=structure.interface, held=lambda number: blocks[number].held(kind))


def _loss(kind: Any, source: Source, losses: list[float], live: list[float]) -> FixedLoss:
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
