"""Comparison of two adapters of one base: how alike their changes are, whatever the gauge of their factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from duat_cli.analysis.lora.weights.change import Change
from duat_cli.analysis.lora.weights.weight_change import leading_of, numbers_of
from duat_cli.errors import CheckpointError
from duat_cli.operators.lowrank import LowRank, Piece, inner, overlap, written_out
from duat_cli.results.weight_change import Comparison, ModuleComparison

SHOWN_ANGLES = 16
AGREE = 0.5

Changes = Mapping[str, Callable[[], Change]]


def compare(other: str, first: Changes, second: Changes) -> Comparison:
    """Compares one parameter at a time in memory. A parameter that either leaves unchanged is only listed."""
    modules: list[ModuleComparison] = []
    only_first, only_second = [], []
    dot = one = two = 0.0
    for parameter in dict.fromkeys([*first, *second]):
        a = _real(first[parameter]() if parameter in first else None)
        b = _real(second[parameter]() if parameter in second else None)
        if a is not None and b is not None and [p.shape for p in a.pieces] != [q.shape for q in b.pieces]:
            raise CheckpointError(f"{parameter}: the adapters change it in other shapes: they have no common base")
        if a is None or b is None:
            only_first += [parameter] if a is not None else []
            only_second += [parameter] if b is not None else []
        else:
            product = sum(inner(p, q) for p, q in zip(a.pieces, b.pieces, strict=True))
            modules.append(_module(a, b, product))
            dot += product
        one += _square(a)
        two += _square(b)
    cosine = dot / (one * two) ** 0.5 if one and two else None
    return Comparison.explained(
        "one of the adapters changes nothing",
        other=other,
        modules=modules,
        only_first=only_first,
        only_second=only_second,
        cosine=None if cosine is None else _clamped(cosine),
        agreeing=[m.whole_name for m in modules if m.cosine is not None and m.cosine > AGREE],
        opposing=[m.whole_name for m in modules if m.cosine is not None and m.cosine < -AGREE],
    )


def _real(change: Change | None) -> Change | None:
    return None if change is None or change.fault or change.is_zero else change


def _square(change: Change | None) -> float:
    return 0.0 if change is None else sum(inner(p, p) for p in change.pieces)


def _module(a: Change, b: Change, product: float) -> ModuleComparison:
    x, y = _square(a) ** 0.5, _square(b) ** 0.5
    distance = sum(_distance(p, q) ** 2 for p, q in zip(a.pieces, b.pieces, strict=True)) ** 0.5
    rows, columns, why = _angles(a, b)
    output, into = (columns, rows) if a.plan.inputs_first else (rows, columns)
    return ModuleComparison.explained(
        why,
        name=a.plan.module,
        parameter=a.plan.parameter.rpartition(".")[2],
        cosine=_clamped(product / (x * y)),
        distance=distance,
        relative_distance=min(distance / (x + y), 1.0),
        output_cosines=output,
        input_cosines=into,
    )


def _distance(p: Piece, q: Piece) -> float:
    """‖P - Q‖, from the difference itself: ‖P‖² + ‖Q‖² - 2⟨P, Q⟩ would lose the difference of two changes that are
    nearly equal."""
    if isinstance(p, LowRank) and isinstance(q, LowRank):
        left, right = torch.linalg.qr(p.minus(q).left)[1], torch.linalg.qr(p.minus(q).right.mT)[1]
        return float((left @ right.mT).norm())
    return float((written_out(p) - written_out(q)).norm())


def _angles(a: Change, b: Change) -> tuple[list[float] | None, list[float] | None, str]:
    """Cosines of the principal angles between the changes' left singular subspaces and between their right ones, or why
    there are none."""
    if len(a.pieces) > 1:
        return None, None, "a stack of experts has a subspace each"
    known = [numbers_of(change).ranks for change in (a, b)]
    if known[0] is None or known[1] is None:
        return None, None, "a vector has no subspace"
    found = [leading_of(c.pieces[0], r.numerical) for c, r in zip((a, b), known, strict=True) if r is not None]
    if found[0] is None or found[1] is None:
        return None, None, "the leading directions did not converge"
    x, y = found[0], found[1]
    rows, columns = overlap(x.left, y.left), overlap(x.right, y.right)
    return rows[:SHOWN_ANGLES].tolist(), columns[:SHOWN_ANGLES].tolist(), ""


def _clamped(cosine: float) -> float:
    return min(max(cosine, -1.0), 1.0)
