"""Sentences on a change of weights, for a reader to see first; each rests on numbers of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from duat_cli.analysis.lora.weights.kinds import energy_of, place_of, rank_limit
from duat_cli.checks.places import Role, role_of
from duat_cli.grouping import by_key
from duat_cli.loading.adapter.origins import Renumbered
from duat_cli.loading.checkpoint.parts import Part
from duat_cli.results.lora import LoraSummary
from duat_cli.results.weight_change import Comparison, KindChange, ModuleChange
from duat_cli.text import indices

FAR_BELOW = 8  # a rank is called low if this multiple of it is at most the matrix's smaller side
EVEN = 2  # shares are called even if the largest is at most this multiple of the smallest
_ROLES: dict[Role, str] = {
    "routing": "queries and keys (which tokens attention reads)",
    "values": "values and outputs (what it carries)",
    "FFN": "FFNs",
}
PROMPTED = ("kl", "loss_change", "loss_change_low", "loss_change_high")
"""Fields of the summary that runs of prompts give."""


def summarise(
    modules: Sequence[ModuleChange],
    kinds: Sequence[KindChange],
    energy: float | None,
    base_energy: float | None,
    comparison: Comparison | None,
) -> LoraSummary:
    """The summary. kinds: those of the modules. energy: Σ‖Δ‖² of all changes, None where one is not known; base_energy:
    Σ‖W‖² of the parameters that change, likewise."""
    why = "the base's values are not all known, finite and nonzero"
    if energy is None or not modules:
        why = "a change is not known" if energy is None else "nothing changes"
    whose = "the first: " if comparison is not None else ""
    return LoraSummary.explained(
        why,
        dict.fromkeys(PROMPTED, "no prompts were run"),
        **dict.fromkeys(PROMPTED),
        changed=len(modules),
        frobenius_norm=energy**0.5 if energy is not None and modules else None,
        relative_frobenius=(energy / base_energy) ** 0.5 if energy is not None and base_energy else None,
        notable=[*_alike(comparison), *(f"{whose}{said}" for said in _said(modules, kinds))],
    )


def _said(modules: Sequence[ModuleChange], kinds: Sequence[KindChange]) -> list[str]:
    """Sentences on what changed most, in which blocks, by role, on the rank that is used, and on what is suspicious."""
    return [
        *_largest(modules, kinds),
        *_where(modules),
        *_roles(modules),
        *_ranks(modules),
        *_low_rank(modules),
        *_intruders(modules),
        *_rounded(modules),
    ]


def numbered_anew(found: Renumbered) -> str:
    """A sentence on which blocks of the base the tuned checkpoint's blocks came from."""
    numbers = [(_number(one.block), None if one.base is None else _number(one.base)) for one in found.blocks]
    # offset of the base's number from the own -> own numbers; None: blocks that match none of the base's
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


def _largest(modules: Sequence[ModuleChange], kinds: Sequence[KindChange]) -> list[str]:
    """A sentence on the kinds that changed most and least, relative to their base weights."""
    measured = [kind for kind in kinds if kind.relative]
    if len(modules) < 2 or not measured:
        return []
    most = max(measured, key=lambda kind: kind.relative or 0.0)
    least = min(measured, key=lambda kind: kind.relative or 0.0)
    said = f"{most.name} changed most: {percent(most.relative)} % of its base weights"
    if most.parameters > 1:
        at = "" if most.most_in is None else f", most in block {most.most_in}"
        said += f" together, {percent(most.relative_least)} to {percent(most.relative_most)} % each{at}"
    return [said if most is least else f"{said}; {least.name} least: {percent(least.relative)} %"]


def percent(share: float | None) -> str:
    percent = 100 * (share or 0.0)
    return "<0.1" if 0 < percent < 0.05 else f"{percent:.3g}"


def _where(modules: Sequence[ModuleChange]) -> list[str]:
    """A sentence on the blocks with most of the change; none for a model of several stacks."""
    inside = [(place, energy_of(module)) for module in modules if (place := place_of(module)[0])]
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
        return [f"{every} share their change evenly, {percent(shares[-1])} to {percent(shares[0])} % each"]
    half = next(n for n in range(1, len(shares) + 1) if math.fsum(shares[:n]) >= 0.5)
    return [
        f"at least half of the change of {every} lies in {indices('block', ordered[:half])}; block {ordered[0]} has "
        f"most, {percent(shares[0])} %"
    ]


def _roles(modules: Sequence[ModuleChange]) -> list[str]:
    """A sentence on how the blocks' change is shared between queries and keys, values and outputs, and FFNs."""
    inside = [(role_of(module.name), energy_of(module)) for module in modules if place_of(module)[0]]
    known = [(role, energy) for role, energy in inside if energy is not None]
    whole = math.fsum(energy for _, energy in known)
    if not whole or len(known) < max(2, len(inside)):
        return []
    shares = {role: math.fsum(energies) / whole for role, energies in by_key(known).items()}
    if shares.get(None, 0.0) > 0.5:
        return []  # the names say little
    said = [f"{what} {percent(shares[role])} %" for role, what in _ROLES.items() if role in shares]
    said += [f"others {percent(shares[None])} %"] if None in shares else []
    return [f"of the blocks' change (sum of |dW|^2), by the names: {', '.join(said)}"]


def _ranks(modules: Sequence[ModuleChange]) -> list[str]:
    """A sentence on how much of its rank an adapter uses; stacks of experts, where each has a rank, are left out."""
    known = [(m.energy_rank_90, limit) for m in modules if len(m.shape) == 2 and (limit := rank_limit(m))]
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
    """A sentence for a checkpoint in which every matrix moves by a few directions and rounding; none unless all
    singular values are known.

    The few directions must hold 90 % of each change: otherwise more than rounding may lie below the floor.
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
    """A sentence for changes whose rank is mostly made by rounding to the stored dtype, not by training."""
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
