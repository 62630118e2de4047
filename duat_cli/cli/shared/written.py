"""What `duat prune-bound` says of a set that it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from duat_cli.kinds import names_of
from duat_cli.text import plural

if TYPE_CHECKING:
    from duat_cli.results.prune.sets import Plan
    from duat_cli.results.prune.written import Written


def set_line(plan: Plan, removed: int) -> str:
    """Which set is written, and what is known of it."""
    several = "," in plan.granularity
    of = f"{plan.of} {names_of(plan.granularity)}" if several else plural(plan.of, plan.granularity)
    what = f"{removed} of {of}"
    guaranteed = 0 if plan.guarantee is None else plan.guarantee.removed
    if removed == guaranteed:
        beside = "" if guaranteed == plan.removed else f" (the largest within the budget has {plan.removed})"
        return f"the guaranteed set of {what}{beside}"
    if removed == plan.removed and plan.remove is not None:
        whose = "the model" if plan.parameters_of == "all" else "the blocks"
        share = f"{100 * plan.parameters_share:.3g} % of the parameters of {whose}"
        return f"{what}, which hold {share}" + ("; it is not guaranteed" if plan.guarantee else "")
    if removed == plan.removed:
        return f"{what}, the largest set within the budget" + ("; it is not guaranteed" if plan.guarantee else "")
    beyond = f"; the guaranteed set has {guaranteed}" if plan.guarantee and removed > guaranteed else ""
    return f"{what}, as --set says{beyond}"


def written_line(written: Written) -> str:
    """What became of the set, of the size of the weights, and of the output."""
    parts = [f"{plural(len(written.removed_blocks), 'block')} removed"] if written.removed_blocks else []
    parts += [f"{plural(written.removed_neurons, 'neuron')} a block removed"] if written.removed_neurons else []
    if written.removed_groups:
        groups = plural(written.removed_groups, "key and value head")
        whose = "it" if written.removed_groups == 1 else "them"
        parts.append(f"{groups} a block removed with the heads that use {whose}")
    parts += [f"{plural(written.zeroed, 'term')} zeroed (still stored: no byte saved)"] if written.zeroed else []
    return (
        f"{', '.join(parts)}; weights {_size(written.bytes_before)} -> {_size(written.bytes_after)} in "
        f"{written.dtype}; read back: relative distance of its output from the ablated model's {written.error:.1e}"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} KB"
