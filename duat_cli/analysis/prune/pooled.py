"""How far removing sets turns the pooled output of an embedder.

Users of an embedder compare directions of pooled outputs, whereas damage is over the outputs of all tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional

from duat_cli.analysis.plan.waves import waves
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.work import Work
from duat_cli.loading.declared.pooling import Pooling, pooling_of
from duat_cli.loading.prompts import Prompt
from duat_cli.models.budgets import LEADING, waiting_bytes
from duat_cli.models.sweep.lockstep import Pass
from duat_cli.models.sweep.passes import Leading, Removals
from duat_cli.models.sweep.rows import without_each
from duat_cli.results.base import Skipped
from duat_cli.results.prune.sets import Plan, PooledCosine

WHAT = "cosines of pooled outputs"
REPAIRED = "--repair: sets are judged with the repaired weights, and the cosines would be without"
NO_HOLDOUT = "no held-out prompts"


def pooled_cosines(
    work: Work, plans: Sequence[Plan], nested: Mapping[str, Nested], held_out: Sequence[Prompt]
) -> tuple[list[PooledCosine], list[Skipped]]:
    """Cosines of every plan's set and of its guaranteed set, on the prompts that chose it and on the held-out ones; or
    the reason why there are none. Weights that are read block by block are read once more."""
    if not work.embeds:
        return [], []
    pooling = pooling_of(work.session.loaded.files.path)
    if isinstance(pooling, str) or work.options.repair:
        return [], [Skipped(what=WHAT, why=pooling if isinstance(pooling, str) else REPAIRED)]
    wanted = [
        (plan.granularity, removed)
        for plan in plans
        for removed in sorted({plan.removed, plan.guarantee.removed if plan.guarantee else 0} - {0})
    ]
    sets = [work.ablator.removals(nested[kind].order[:removed]) for kind, removed in wanted]
    cosines = _cosines(work, pooling, sets, [*work.prompts, *held_out])
    found = []
    for k, (kind, removed) in enumerate(wanted):
        row = [cosine[k] for cosine in cosines]
        inside, outside = row[: len(work.prompts)], row[len(work.prompts) :]
        found.append(
            PooledCosine.explained(
                NO_HOLDOUT,
                granularity=kind,
                removed=removed,
                pooling=pooling.name,
                mean=statistics.fmean(inside),
                lowest=min(inside),
                held_out_mean=statistics.fmean(outside) if outside else None,
                held_out_lowest=min(outside, default=None),
            )
        )
    return found, []


def _cosines(work: Work, pooling: Pooling, sets: Sequence[Removals], prompts: Sequence[Prompt]) -> list[list[float]]:
    """Cosine between each prompt's own pooled output and the one without each set: a list per prompt, a value per set.

    The passes without a set run behind the prompt's own pass."""
    if not sets:
        return [[] for _ in prompts]
    width, found = work.structure.hidden_size, list[list[float]]()
    sizes = [(LEADING + len(sets)) * waiting_bytes(one.input_ids.shape[1], width) for one in prompts]
    for wave in waves(sizes, work.ablator.waiting) if work.weights is not None else [[k] for k in range(len(prompts))]:
        work.processes(wave[0], len(prompts), WHAT)
        passes, rows = list[Pass](), []
        for k in wave:
            forward = work.metric.forward(work.ablator.place(prompts[k]))
            own = Leading(work.structure, forward, prompts[k].input_ids.shape[1])
            rows.append((own, [without_each(work.structure, forward, own, [gone]) for gone in sets]))
            passes += [own, *rows[-1][1]]
        work.session.together(passes)
        found += [[_cosine(pooling.of(own.output), pooling.of(one.output)) for one in ones] for own, ones in rows]
    return found


def _cosine(one: Tensor, other: Tensor) -> float:
    """Cosine similarity, cut to 1, which rounding may exceed."""
    return min(1.0, float(functional.cosine_similarity(one, other, dim=0)))
