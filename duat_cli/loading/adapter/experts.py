"""LoRA on parameters (`target_parameters`), such as stacks of experts: the keys name the module, not the parameter."""

from __future__ import annotations

from duat_cli.loading.adapter.base_weights import Place
from duat_cli.loading.adapter.folder import names
from duat_cli.loading.adapter.keys import Target
from duat_cli.loading.adapter.lora import scaling_of
from duat_cli.loading.adapter.parameter import ParameterPlan, Wrapped, fault
from duat_cli.text import listed, shown


def parameter_leaves(one: Wrapped, siblings: list[Target]) -> list[str]:
    """Parameters of the target's module that target_parameters ask for; empty where it is a module like any other.

    PEFT takes every parameter whose name ends in one of them; without a base a name without its module tells nothing.
    """
    found, module = set(), one.target.module
    for name in names(one.adapter, "target_parameters"):
        holder, _, leaf = name.rpartition(".")
        if holder:
            asked = module == holder or module.endswith("." + holder)
        else:
            asked = len(siblings) > 1 if one.base is None else one.base.find(f"{module}.{leaf}") is not None
        if asked:
            found.add(leaf)
    return sorted(found)


def experts(one: Wrapped, siblings: list[Target], leaves: list[str]) -> ParameterPlan:
    """LoRA on a parameter (E, ., .): A (E r, in) by experts, B (out, r E) by ranks; the key names no parameter."""
    adapter, target, base = one.adapter, one.target, one.base
    both, into, out = one.pair("lora_A", "lora_B")
    if base is None:
        raise one.fault("needs-base", ": its tensors name no parameter; the base's shapes are needed to tell")
    fitting: list[tuple[str, Place, bool]] = []
    for leaf in leaves:
        place = base.find(f"{target.module}.{leaf}")
        if place is None:
            raise fault(adapter, "target-absent", f"target_parameters: the base has no {shown(target.module)}.{leaf}")
        shape = place.shape if len(place.shape) == 3 else (1, *place.shape)
        if len(shape) == 3 and both % shape[0] == 0:
            layouts = {False: (out, into), True: (into, out)} if len(place.shape) == 3 else {False: (out, into)}
            fitting += [(leaf, place, turned) for turned, sides in layouts.items() if shape[1:] == sides]
    if len({leaf for leaf, _, _ in fitting}) > 1:  # of one shape: PEFT wraps the module's first parameter first
        declared = (name.rpartition(".") for name in base.parameters())  # in the order of the class
        order = [leaf for module, _, leaf in declared if module == target.module and leaf in leaves]
        depth = sorted({t.depth for t in siblings}, reverse=True)
        at = depth.index(target.depth)
        fitting = [f for f in fitting if len(order) == len(depth) and f[0] == order[at]]
    if not fitting:
        raise one.fault("shape-mismatch", f": lora_A, lora_B map {into} to {out} features, which is the shape of none "
                        f"of {listed(leaves)} in the base")  # fmt: skip
    if len(fitting) > 1 and base.holds_inputs_first(target.module):
        fitting = [f for f in fitting if f[2]]  # PEFT keeps the stored order, whatever its version
    elif len(fitting) > 1:
        raise one.fault("ambiguous-layout", f".{fitting[0][0]}: a square parameter; shapes do not tell which side of "
                        "it is the input")  # fmt: skip
    leaf, place, turned = fitting[0]
    experts = place.shape[0] if len(place.shape) == 3 else 1
    rank = both // experts
    scaling = scaling_of(adapter, f"{target.module}.{leaf}", rank)
    module = place.parameter.rpartition(".")[0]
    return ParameterPlan(module, f"{module}.{leaf}", "expert lora", target.parts, rank, scaling, turned, experts, place)
