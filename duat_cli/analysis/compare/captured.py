"""The dynamic parameters of every block under several prompts, in a form that a pass of the model can be given in place
of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from duat_cli.analysis.compare.states import block_bytes
from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.progress import Progress, ticker
from duat_cli.analysis.session import Listener, Session
from duat_cli.errors import InputError, needed
from duat_cli.loading.prompts import Prompt
from duat_cli.models.block.norms import FrozenNorm
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.instrument.held import Held
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.routers import Routers, mean_routed
from duat_cli.models.value_path.operator import whole_rows

KEPT_BYTES = 4 << 30  # most that is kept of all prompts


Captured = dict[int, Held]
"""All dynamic parameters under one prompt, or their means, by block call."""


def of_kinds(captured: Held, kinds: Sequence[str]) -> Held:
    """The captured parameters of these kinds, by the names of `Held`; the others stay live."""
    return Held(**{kind: getattr(captured, kind) for kind in kinds})


def capture(
    session: Session,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    errors: list[float] | None = None,
    units: bool = False,
) -> list[Captured]:
    """Captures each prompt. errors: list that takes the errors of the certificate, which
    needs replays; None: no certificate is made. units: whether to keep the outputs of FFNs and of cross-attention."""
    found: list[Captured] = [{} for _ in prompts]
    tick = ticker(progress, session.depth, len(prompts))
    routers = Routers()

    def listener(number: int) -> Listener:
        decomposition = Decomposition()

        def listen(run: BlockRun) -> None:
            routed = routers.inside(run.parts.module)  # before replays
            if errors is not None:
                errors.append(decomposition.advance(run).terms.error)
            rows = [StoredRows(whole_rows(call.rows)) for call in run.attention]
            given = (ffns(run), crossings(run)) if units else ({}, {})
            found[number][run.index] = Held(rows, dict(run.recording.norms), routed, *given)
            tick(number)

        return listen

    with routers.seen(session.loaded.model):
        session.sweep_all(prompts, listener)
    return found


def ffns(run: BlockRun) -> dict[nn.Module, list[Tensor]]:
    """Outputs of each FFN of the block, without modules that mix tokens without attention weights."""
    found = defaultdict[nn.Module, list[Tensor]](list)
    for unit in run.units:
        apart = unit.module in {*run.parts.mixing, *run.parts.attention} or run.parts.is_cross(unit.module)
        if unit.module in run.parts.units and not apart:
            found[unit.module].append(unit.output)
    return dict(found)


def crossings(run: BlockRun) -> dict[nn.Module, list[Tensor]]:
    """Outputs of the block's cross-attention; empty without one."""
    outputs = [unit.output for unit in run.units if run.parts.is_cross(unit.module)]
    return {run.parts.cross.module: outputs} if run.parts.cross is not None and outputs else {}


def require_equal(option: str, prompts: Sequence[Prompt]) -> None:
    """Raises InputError for prompts of unequal length."""
    counts = sorted({prompt.input_ids.shape[1] for prompt in prompts})
    if len(counts) > 1:
        raise InputError(
            f"{option}: prompts of {', '.join(map(str, counts[:4]))}{', ...' if len(counts) > 4 else ''} tokens; one "
            "is given what is another's, token by token, so they must be of equal length: give others, or use "
            f"--max-tokens {counts[0]}"
        )


def as_many_tokens(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, each cut to the length of the shortest."""
    shortest = min(prompt.input_ids.shape[1] for prompt in prompts)
    return [replace(prompt, input_ids=prompt.input_ids[:, :shortest]) for prompt in prompts]


def require_room(option: str, session: Session, prompts: Sequence[Prompt], vectors: int = 0) -> None:
    """Raises InputError where the attention matrices of all prompts and their mean do not fit in KEPT_BYTES. vectors:
    how many vectors of the hidden size are kept beside them for each token and block."""
    tokens = max(prompt.input_ids.shape[1] for prompt in prompts)
    size = (len(prompts) + 1) * session.depth * block_bytes(session, tokens, vectors)
    if size > KEPT_BYTES:
        raise InputError(
            f"{option}: attention matrices of {len(prompts)} prompts of up to {tokens} tokens take {size >> 20} MiB, "
            f"more than {KEPT_BYTES >> 20}; use fewer prompts or --max-tokens"
        )


def mean_of(blocks: Sequence[Held]) -> Held:
    """Mean of one block call's dynamic parameters over the prompts."""
    attention = [
        StoredRows(torch.stack([*map(whole_rows, same)]).mean(dim=0))
        for same in zip(*(needed(block.attention) for block in blocks), strict=True)
    ]
    norms = {}
    for norm, first in blocks[0].norms.items():
        scales = zip(*([one.scale for one in block.norms[norm]] for block in blocks), strict=True)
        norms[norm] = [
            FrozenNorm(one.form, torch.stack(same).mean(dim=0)) for one, same in zip(first, scales, strict=True)
        ]
    routers = {module: mean_routed([block.routers[module] for block in blocks]) for module in blocks[0].routers}
    return Held(attention, norms, routers)
