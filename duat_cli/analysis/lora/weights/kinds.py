"""The change of weights by kind of parameter, such as the query projections of all blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from duat_cli.checks.places import BlockPlace, block_of
from duat_cli.grouping import by_key
from duat_cli.results.base import WithReasons
from duat_cli.results.weight_change import Comparison, KindChange, KindComparison, ModuleChange

_FACTORS = frozenset(("lora", "embedding lora", "expert lora", "adalora"))  # kinds of change of at most the stated rank
_INNER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number within a block, such as an expert's


def kinds_of(modules: Sequence[ModuleChange]) -> list[KindChange]:
    """Changes by kind: one entry for the parameters that differ in their block or expert alone. The kind with most of
    the change is first."""
    energies = [energy_of(module) for module in modules]
    whole = sum(one or 0.0 for one in energies) if None not in energies else None
    found = [_kind(name, rows, whole) for name, rows in _by_kind(modules).items()]
    return sorted(found, key=lambda kind: -(kind.share or 0.0))


def energy_of(module: ModuleChange) -> float | None:
    return None if module.frobenius_norm is None else module.frobenius_norm**2


def _by_kind(modules: Sequence[ModuleChange]) -> dict[str, list[ModuleChange]]:
    """Kind -> its parameters. Numbers within a block are left out of a kind's name where all that they tell apart have
    one shape, as experts do, unlike the first and the third layer of a sequence."""
    placed = [(module, *place_of(module)) for module in modules]
    stacks = {place.stack for _, place, _ in placed if place}
    inners = by_key((_INNER.sub("*", inner), inner) for _, _, inner in placed)
    shapes = by_key(((place, _INNER.sub("*", inner)), tuple(module.shape)) for module, place, inner in placed)
    alike = {general for general, names in inners.items() if len(set(names)) > 1}
    alike -= {general for (_, general), found in shapes.items() if len(set(found)) > 1}

    def name(place: BlockPlace | None, inner: str) -> str:
        general = _INNER.sub("*", inner)
        kind = general if general in alike else inner
        return f"{place.stack}.*.{kind}" if place and len(stacks) > 1 else kind

    return by_key((name(place, inner), module) for module, place, inner in placed)


def place_of(module: ModuleChange) -> tuple[BlockPlace | None, str]:
    """The block of a parameter, and its name in the block, without the word weight."""
    name = module.name if module.parameter == "weight" else module.whole_name
    return block_of(name) or (None, name)


def _kind(name: str, rows: Sequence[ModuleChange], whole: float | None) -> KindChange:
    """Entry of one kind. whole: Σ‖Δ‖² of all kinds."""
    energies, ratios = [energy_of(row) for row in rows], [row.relative_frobenius for row in rows]
    energy = sum(one or 0.0 for one in energies)
    measured = None not in ratios
    base = sum(one / ratio**2 for one, ratio in zip(energies, ratios, strict=True) if one and ratio)
    top = max(rows, key=lambda row: row.relative_frobenius or 0.0)
    limits = [rank_limit(row) for row in rows]
    needed = [row.energy_rank_90 for row in rows]
    seen = [None if row.intruders is None else row.intruders.output for row in rows]
    place = place_of(top)[0]
    why = {
        "share": "a change is not known, or all are zero",
        "most_in": "outside of blocks" if measured else _why(rows, "relative_frobenius"),
        "rank_limit": "no product of factors alone bounds the rank of every change",
        "energy_rank_90_most": _why(rows, "energy_rank_90"),
        "with_intruders": _why([row.intruders or row for row in rows], "output", "intruders"),
    }
    return KindChange.explained(
        _why(rows, "relative_frobenius"),
        why,
        name=name,
        parameters=len(rows),
        blocks=sorted({at.index for row in rows if (at := place_of(row)[0])}),
        share=min(energy / whole, 1.0) if whole else None,
        relative=(energy / base if base else 0.0) ** 0.5 if measured else None,
        relative_least=min(one or 0.0 for one in ratios) if measured else None,
        relative_most=top.relative_frobenius if measured else None,
        most_in=place.index if place is not None and measured else None,
        rank_limit=None if None in limits else max(one or 0 for one in limits),
        energy_rank_90_most=None if None in needed else max(one or 0 for one in needed),
        with_intruders=None if None in seen else sum(1 for one in seen if one),
    )


def compared_kinds(
    comparison: Comparison, first: Sequence[ModuleChange], second: Sequence[ModuleChange]
) -> list[KindComparison]:
    """The comparison by kind, from norms of both adapters' changes; empty where one changes a parameter in several
    ways."""
    norms = [{one.whole_name: one.frobenius_norm for one in side} for side in (first, second)]
    if [len(one) for one in norms] != [len(first), len(second)]:
        return []
    both = {one.whole_name: one for one in comparison.modules}
    found = []
    for name, rows in _by_kind([one for one in first if one.whole_name in both]).items():
        each = [both[row.whole_name] for row in rows]
        x, y = ([side[one.whole_name] or 0.0 for one in each] for side in norms)
        cosines = [one.cosine or 0.0 for one in each]
        one, two = math.hypot(*x), math.hypot(*y)
        product = math.fsum(c * a * b for c, a, b in zip(cosines, x, y, strict=True))
        found.append(
            KindComparison(
                name=name,
                parameters=len(each),
                cosine=min(max(product / (one * two), -1.0), 1.0),
                cosine_least=min(cosines),
                cosine_most=max(cosines),
                relative_distance=min(math.hypot(*(pair.distance for pair in each)) / (one + two), 1.0),
            )
        )
    return found


def _why(rows: Sequence[WithReasons], *fields: str) -> str:
    """The reason given by the first of the rows that lacks one of these fields."""
    return next((row.reasons[field] for row in rows for field in fields if field in row.reasons), "")


def rank_limit(module: ModuleChange) -> int | None:
    """Largest rank that the factors allow; None where they do not bound it, as a change relative to a base that an
    initialisation changed may have a higher rank."""
    if module.rank is None or module.kind not in _FACTORS or module.numerical_rank is None:
        return None
    limit = module.rank * (module.shape[0] if module.kind == "expert lora" else 1)
    return limit if module.numerical_rank <= limit else None
