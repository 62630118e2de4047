"""The summary of a change of weights: what a reader should see first, each sentence backed by the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.results.lora import LoraSummary
from duat_cli.results.weight_change import Comparison, ModuleChange

FAR_BELOW = 8  # times a rank that is called low is at most the matrix's smaller side


def summarise(
    modules: Sequence[ModuleChange], energy: float | None, base_energy: float | None, comparison: Comparison | None
) -> LoraSummary:
    """energy: Σ‖Δ‖² of all changes, None where one is not known; base_energy: Σ‖W‖² of what changes, the same."""
    known = energy is not None and bool(modules)
    relative = (energy / base_energy) ** 0.5 if energy is not None and base_energy else None
    reasons: dict[str, str] = {}
    if not known:
        reasons["frobenius_norm"] = "a change is not known" if energy is None else "nothing changes"
    if relative is None:
        unread = "the base's values are not all known, finite and nonzero"
        reasons["relative_frobenius"] = reasons.get("frobenius_norm", unread)
    return LoraSummary(
        changed=len(modules),
        frobenius_norm=energy**0.5 if energy is not None and modules else None,
        relative_frobenius=relative,
        notable=[
            *_largest(modules),
            *_low_rank(modules),
            *_intruders(modules),
            *_rounded(modules),
            *_alike(comparison),
        ][:4],
        reasons=reasons,
    )


def _largest(modules: Sequence[ModuleChange]) -> list[str]:
    measured = [m for m in modules if m.relative_frobenius is not None]
    if len(measured) < 2:
        return []
    top = max(measured, key=lambda m: m.relative_frobenius or 0.0)
    return [f"{top.whole_name} changed most: {100 * (top.relative_frobenius or 0):.3g} % of its base weight"]


def _intruders(modules: Sequence[ModuleChange]) -> list[str]:
    settled = [m for m in modules if m.intruders is not None and m.intruders.output is not None]
    having = [m for m in settled if m.intruders is not None and m.intruders.output]
    if not settled:
        return []
    return [f"{len(having)} of {len(settled)} parameters have intruder dimensions on the output side"]


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
