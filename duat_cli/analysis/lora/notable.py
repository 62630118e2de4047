"""What a reader should see first of a change of weights and of what it does to prompts: the change by kind of
parameter, and sentences that the numbers back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from duat_cli.checks.places import BlockPlace, Role, block_of, role_of
from duat_cli.grouping import by_key
from duat_cli.loading.adapter.origins import Renumbered
from duat_cli.loading.checkpoint.parts import Part
from duat_cli.results.base import WithReasons
from duat_cli.results.lora import BlockChange, LoraSummary, PromptChange
from duat_cli.results.weight_change import Comparison, KindChange, KindComparison, ModuleChange
from duat_cli.text import indices

FAR_BELOW = 8  # times a rank that is called low is at most the matrix's smaller side
EVEN = 2  # the block that changes most has at most so many times what the least has
_ROLES: dict[Role, str] = {
    "routing": "queries and keys (which tokens attention reads)",
    "values": "values and outputs (what it carries)",
    "FFN": "FFNs",
}
_FACTORS = frozenset(("lora", "embedding lora", "expert lora", "adalora"))  # kinds of change of at most the stated rank
_INNER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number within a block, such as an expert's


def kinds_of(modules: Sequence[ModuleChange]) -> list[KindChange]:
    """The changes of parameters that differ in their block alone, or in their expert, together; the kind that has most
    of the change first."""
    energies = [_energy(module) for module in modules]
    whole = sum(one or 0.0 for one in energies) if None not in energies else None
    found = [_kind(name, rows, whole) for name, rows in _by_kind(modules).items()]
    return sorted(found, key=lambda kind: -(kind.share or 0.0))


def _energy(module: ModuleChange) -> float | None:
    return None if module.frobenius_norm is None else module.frobenius_norm**2


def _by_kind(modules: Sequence[ModuleChange]) -> dict[str, list[ModuleChange]]:
    """Numbers within a block are left out where what they tell apart has one shape: experts, and not the first and the
    third layer of a sequence."""
    placed = [(module, *_place(module)) for module in modules]
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


def _place(module: ModuleChange) -> tuple[BlockPlace | None, str]:
    """The block, and the name in it, without the word weight."""
    name = module.name if module.parameter == "weight" else module.whole_name
    return block_of(name) or (None, name)


def _kind(name: str, rows: Sequence[ModuleChange], whole: float | None) -> KindChange:
    """whole: Σ‖Δ‖² of all kinds."""
    energies, ratios = [_energy(row) for row in rows], [row.relative_frobenius for row in rows]
    energy = sum(one or 0.0 for one in energies)
    measured = None not in ratios
    base = sum(one / ratio**2 for one, ratio in zip(energies, ratios, strict=True) if one and ratio)
    top = max(rows, key=lambda row: row.relative_frobenius or 0.0)
    limits = [_rank_limit(row) for row in rows]
    needed = [row.energy_rank_90 for row in rows]
    seen = [None if row.intruders is None else row.intruders.output for row in rows]
    place = _place(top)[0]
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
        blocks=sorted({at.index for row in rows if (at := _place(row)[0])}),
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
    """By kind, from the norms of both adapters' changes; nothing where one changes a parameter in several ways."""
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
    """Of the first of the rows that has not all of these fields."""
    return next((row.reasons[field] for row in rows for field in fields if field in row.reasons), "")


def _rank_limit(module: ModuleChange) -> int | None:
    """Directions that the factors allow. Relative to a base that an initialisation changed there can be more."""
    if module.rank is None or module.kind not in _FACTORS or module.numerical_rank is None:
        return None
    limit = module.rank * (module.shape[0] if module.kind == "expert lora" else 1)
    return limit if module.numerical_rank <= limit else None


def summarise(
    modules: Sequence[ModuleChange], energy: float | None, base_energy: float | None, comparison: Comparison | None
) -> LoraSummary:
    """energy: Σ‖Δ‖² of all changes, None where one is not known; base_energy: Σ‖W‖² of what changes, the same."""
    why = "the base's values are not all known, finite and nonzero"
    if energy is None or not modules:
        why = "a change is not known" if energy is None else "nothing changes"
    whose = "the first: " if comparison is not None else ""
    return LoraSummary.explained(
        why,
        changed=len(modules),
        frobenius_norm=energy**0.5 if energy is not None and modules else None,
        relative_frobenius=(energy / base_energy) ** 0.5 if energy is not None and base_energy else None,
        notable=[*_alike(comparison), *(f"{whose}{said}" for said in _said(modules))],
    )


def _said(modules: Sequence[ModuleChange]) -> list[str]:
    """What changed most, in which blocks, whether it is routing, whether the rank is used, and what is suspicious."""
    return [
        *_largest(modules),
        *_where(modules),
        *_roles(modules),
        *_ranks(modules),
        *_low_rank(modules),
        *_intruders(modules),
        *_rounded(modules),
    ]


def numbered_anew(found: Renumbered) -> str:
    """Which of the base's blocks those of the tuned checkpoint were."""
    numbers = [(_number(one.block), None if one.base is None else _number(one.base)) for one in found.blocks]
    # by how far on the base's stands; None: it has none
    by_distance = by_key((None if base is None else base - own, own) for own, base in numbers)
    said = [
        f"{indices('block', own)} {'was' if len(own) == 1 else 'were'} the base's "
        f"{indices('block', [number + on for number in own])}"
        for on, own in by_distance.items()
        if on
    ]
    said += [f"{indices('block', by_distance[None])}: like none of the base's"] if None in by_distance else []
    said += [f"the base's {indices('block', [_number(b) for b in found.gone])}: not in it"] if found.gone else []
    return f"{found.stack}, by the weights: {'; '.join(said)}"


def _number(block: Part) -> int:
    return int(block.name.rpartition(".")[2])


def most_moved(blocks: Sequence[BlockChange]) -> list[str]:
    """Which W' changed most, and through what."""
    changed = [b for b in blocks if b.operator.relative_change]
    known = [b for b in changed if b.operator.routing is not None and b.operator.weights is not None]
    if not known:
        return []
    top = max(known, key=lambda b: b.operator.relative_change or 0.0)
    routing = [b.operator.routing or 0.0 for b in known]
    weights = [b.operator.weights or 0.0 for b in known]
    more = sum(r > w for r, w in zip(routing, weights, strict=True))
    ffn = [b.terms.ffn for b in blocks if b.terms.ffn is not None]
    added = f"; what FFNs add changed by {_between(ffn)} %" if ffn else ""
    return [
        f"W' of block {top.index} changed most, by {100 * (top.operator.relative_change or 0):.3g} %; routing (what "
        f"attention looks at) changed it by {_between(routing)} % a block, weights (what it carries) by "
        f"{_between(weights)} %, routing more in {more} of {len(known)}{added}"
    ]


def _between(shares: Sequence[float]) -> str:
    least, most = _percent(min(shares)), _percent(max(shares))
    return least if least == most else f"{least} to {most}"


def most_and_least(most: PromptChange | None, least: PromptChange | None) -> list[str]:
    """The prompts whose next tokens moved most and least."""
    if most is None or least is None or most is least or not most.kl:
        return []
    return [
        f"prompt {most.prompt} moved most (KL {most.kl:.3g} nats a token), prompt {least.prompt} least ({least.kl:.3g})"
    ]


def loss_between(what: str, change: float, interval: tuple[float, float] | None) -> str:
    """How far the loss moved, and whether other prompts of the kind would say so too."""
    said = f"{what} {'fell' if change < 0 else 'rose'} by {abs(change):.3g}"
    said += " nats a token, the mean over the prompts"
    if interval is None:
        return f"{said}, too few to say whether it is more than chance"
    low, high = interval
    chance = ", not told apart from no change" if low <= 0 <= high else ""
    return f"{said} (95 % interval of the change: {low:+.3g} to {high:+.3g}{chance})"


def _largest(modules: Sequence[ModuleChange]) -> list[str]:
    """The kind that changed most and the one that changed least, to their base weights."""
    measured = [kind for kind in kinds_of(modules) if kind.relative]
    if len(modules) < 2 or not measured:
        return []
    most = max(measured, key=lambda kind: kind.relative or 0.0)
    least = min(measured, key=lambda kind: kind.relative or 0.0)
    said = f"{most.name} changed most: {_percent(most.relative)} % of its base weights"
    if most.parameters > 1:
        at = "" if most.most_in is None else f", most in block {most.most_in}"
        said += f" together, {_percent(most.relative_least)} to {_percent(most.relative_most)} % each{at}"
    return [said if most is least else f"{said}; {least.name} least: {_percent(least.relative)} %"]


def _percent(share: float | None) -> str:
    percent = 100 * (share or 0.0)
    return "<0.1" if 0 < percent < 0.05 else f"{percent:.3g}"


def _where(modules: Sequence[ModuleChange]) -> list[str]:
    """Which blocks have most of the change; of several stacks nothing."""
    inside = [(place, _energy(module)) for module in modules if (place := _place(module)[0])]
    if len({place.stack for place, _ in inside}) != 1 or any(energy is None for _, energy in inside):
        return []
    energies = {at.index: math.fsum(e or 0.0 for e in of) for at, of in by_key(inside).items()}
    whole = math.fsum(energies.values())
    if len(energies) < 3 or not whole:
        return []
    ordered = sorted(energies, key=lambda block: -energies[block])
    shares = [energies[block] / whole for block in ordered]
    every = indices("block", ordered)
    if shares[0] <= EVEN * shares[-1]:
        return [f"{every} share their change evenly, {_percent(shares[-1])} to {_percent(shares[0])} % each"]
    half = next(n for n in range(1, len(shares) + 1) if math.fsum(shares[:n]) >= 0.5)
    return [
        f"at least half of the change of {every} lies in {indices('block', ordered[:half])}; block {ordered[0]} has "
        f"most, {_percent(shares[0])} %"
    ]


def _roles(modules: Sequence[ModuleChange]) -> list[str]:
    """How the change of the blocks is shared between what decides where attention looks, what it carries, and FFNs."""
    inside = [(role_of(module.name), _energy(module)) for module in modules if _place(module)[0]]
    known = [(role, energy) for role, energy in inside if energy is not None]
    whole = math.fsum(energy for _, energy in known)
    if not whole or len(known) < max(2, len(inside)):
        return []
    shares = {role: math.fsum(energies) / whole for role, energies in by_key(known).items()}
    if shares.get(None, 0.0) > 0.5:
        return []  # the names say little
    said = [f"{what} {_percent(shares[role])} %" for role, what in _ROLES.items() if role in shares]
    said += [f"others {_percent(shares[None])} %"] if None in shares else []
    return [f"of the blocks' change (sum of |dW|^2), by the names: {', '.join(said)}"]


def _ranks(modules: Sequence[ModuleChange]) -> list[str]:
    """Whether an adapter uses its rank. Of a stack of experts the rank is each expert's: nothing."""
    known = [(m.energy_rank_90, limit) for m in modules if len(m.shape) == 2 and (limit := _rank_limit(m))]
    needed, limits = [need for need, _ in known if need], [limit for need, limit in known if need]
    if not needed:
        return []
    said = f"90 % of the energy (sum of sigma^2) of {'each' if len(needed) > 1 else 'the'} change lies in "
    said += f"{_range(needed)} of the {_range(limits)} directions that its rank allows"
    if 2 * max(needed) <= min(limits):
        said += f": a rank of {max(needed)} would hold as much"
    return [said]


def _range(numbers: Iterable[int]) -> str:
    least, most = min(found := list(numbers)), max(found)
    return str(least) if least == most else f"{least} to {most}"


def _intruders(modules: Sequence[ModuleChange]) -> list[str]:
    settled = [m for m in modules if m.intruders is not None and m.intruders.output is not None]
    having = [m for m in settled if m.intruders is not None and m.intruders.output]
    if not settled:
        return []
    what = "intruder dimensions on the output side, leading directions unlike any of the base"
    return [f"{len(having)} of {len(settled)} parameters have {what}"]


def _low_rank(modules: Sequence[ModuleChange]) -> list[str]:
    """Of a checkpoint, all singular values known: where every matrix moves by a few directions and rounding.

    They must hold 90 % of each change: where they do not, what lies below the floor may well be more than rounding.
    """
    found = []
    for module in modules:
        if len(module.shape) < 2:
            continue
        rank = module.rounding.rank_above_floor if module.rounding is not None else None
        if rank is None or module.energy_rank_90 is None or module.energy_rank_90 > rank:
            return []
        if FAR_BELOW * rank > min(module.shape):
            return []
        found.append(rank)
    if not found:
        return []
    return [
        f"every changed matrix moves, up to rounding, by a change of rank at most {max(found)}: a merged low-rank "
        "adapter looks like this"
    ]


def _rounded(modules: Sequence[ModuleChange]) -> list[str]:
    """Where rounding to the stored dtype, not training, makes the rank."""
    fake = [
        m for m in modules
        if m.rounding is not None and m.entropy_rank is not None and m.rounding.rank_above_floor is not None
        and m.rounding.rank_above_floor < 0.5 * m.entropy_rank
    ]  # fmt: skip
    if not fake:
        return []
    dtype = fake[0].rounding.dtype if fake[0].rounding else ""
    return [
        f"rounding to {dtype} makes up most of the rank of {len(fake)} of {len(modules)} changes: "
        "read the rank above the rounding floor"
    ]


def _alike(comparison: Comparison | None) -> list[str]:
    if comparison is None or comparison.cosine is None:
        return []
    many = len(comparison.modules)
    return [
        f"the two changes have cosine {comparison.cosine:.3f}; {len(comparison.agreeing)} of {many} shared parameters "
        f"agree (above 0.5), {len(comparison.opposing)} oppose"
    ]
