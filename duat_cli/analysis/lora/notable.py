"""What a reader should see first of a change of weights and of what it does to prompts: sentences that the numbers
back."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.grouping import by_key
from duat_cli.loading.adapter.origins import Renumbered
from duat_cli.loading.checkpoint.parts import Part
from duat_cli.results.lora import BlockChange, LoraSummary, PromptChange
from duat_cli.results.weight_change import Comparison, ModuleChange
from duat_cli.text import indices

FAR_BELOW = 8  # times a rank that is called low is at most the matrix's smaller side


def summarise(
    modules: Sequence[ModuleChange], energy: float | None, base_energy: float | None, comparison: Comparison | None
) -> LoraSummary:
    """energy: Σ‖Δ‖² of all changes, None where one is not known; base_energy: Σ‖W‖² of what changes, the same."""
    why = "the base's values are not all known, finite and nonzero"
    if energy is None or not modules:
        why = "a change is not known" if energy is None else "nothing changes"
    return LoraSummary.explained(
        why,
        changed=len(modules),
        frobenius_norm=energy**0.5 if energy is not None and modules else None,
        relative_frobenius=(energy / base_energy) ** 0.5 if energy is not None and base_energy else None,
        notable=[
            *_largest(modules),
            *_low_rank(modules),
            *_intruders(modules),
            *_rounded(modules),
            *_alike(comparison),
        ][:4],
    )


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
    routing, weights = top.operator.routing or 0.0, top.operator.weights or 0.0
    what = "routing (what attention looks at)" if routing > weights else "weights (what attention carries)"
    return [
        f"W' of block {top.index} changed most, by {100 * (top.operator.relative_change or 0):.3g} %, more through"
        f" {what}: routing {100 * routing:.3g} %, weights {100 * weights:.3g} %"
    ]


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
