"""Lint rules that need the base's values: how large the change is beside the weight, and heads that break a tie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from duat_cli.analysis.lora.change import Change, Read, change_of
from duat_cli.loading.adapter.base_weights import EMBEDDINGS, HEADS, BaseWeights
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.wording import shown
from duat_cli.operators.lowrank import energy, inner
from duat_cli.results.lora import LintFinding
from duat_cli.text import plural

LARGE, TOO_LARGE = 1.0, 10.0
"""Of ‖ΔW‖_F / ‖W‖_F: what trains a model rarely moves a matrix by a tenth of its norm."""
RelativeNorm: TypeAlias = "tuple[ParameterPlan, float | None]"
"""A plan, and `relative_norm` of it."""


def lint_magnitude(norms: Iterable[RelativeNorm]) -> Iterator[LintFinding]:
    """Matrices whose change is larger than they are: one finding for those above 10 times, one for those above 1."""
    found: dict[str, float] = {}
    for plan, norm in norms:
        if norm is not None and norm > LARGE:
            found[plan.parameter] = max(norm, found.get(plan.parameter, 0.0))
    extreme = {name: norm for name, norm in found.items() if norm > TOO_LARGE}
    others = {name: norm for name, norm in found.items() if name not in extreme}
    for group, limit in ((extreme, TOO_LARGE), (others, LARGE)):
        if group:
            name = max(group, key=lambda one: group[one])
            many = f"; {plural(len(group), 'matrix') if len(group) == 1 else f'{len(group)} matrices'} above {limit:g}"
            yield LintFinding(
                rule="magnitude",
                level="error" if limit == TOO_LARGE else "warning",
                where=name,
                message=f"the change of {shown(name)} is {group[name]:.3g} times its base weight, norm to norm{many}",
            )


def relative_norm(plan: ParameterPlan, read: Read, base: BaseWeights) -> float | None:
    """‖ΔW‖_F / ‖W‖_F of a matrix or a stack of them; None where there is no such number."""
    if plan.place is None or len(plan.place.shape) < 2:
        return None
    change = change_of(plan, read, base)
    return None if change.fault or change.is_zero else ratio(change, energy(base.read(plan.place)))


def ratio(change: Change, size: float) -> float | None:
    """‖ΔW‖_F / ‖W‖_F; None where W is zero or not finite. size: ‖W‖²_F."""
    if not (math.isfinite(size) and size > 0):
        return None
    return math.sqrt(sum(max(0.0, inner(piece, piece)) for piece in change.pieces) / size)


def lint_saved_heads(known: Iterable[ParameterPlan], read: Read, tied: bool) -> Iterator[LintFinding]:
    """A head saved whole over a base whose head is its embedding; silent where both are saved, and alike."""
    if not tied:
        return
    saved = {plan.module.rpartition(".")[2]: plan for plan in known if plan.kind == "saved"}
    head = next((plan for leaf, plan in saved.items() if leaf in HEADS), None)
    if head is None:
        return
    table = next((plan for leaf, plan in saved.items() if leaf in EMBEDDINGS), None)
    if table is not None:
        a, b = read(head.parts["saved"]), read(table.parts["saved"])
        if a.shape == b.shape and bool((a == b.to(a.dtype)).all()):
            return
    yield LintFinding(
        rule="tied-weights",
        level="warning",
        where=head.module,
        message=f"{shown(head.module)} is saved whole, and the base ties it to the input embedding: a runtime that "
        "keeps the tie loses the saved head, or puts it in place of the embedding as well",
    )
