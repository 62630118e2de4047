"""LoRA, DoRA and AdaLoRA on linear layers, embeddings and parameters such as stacks of experts. Rank, scale and layout
follow PEFT's rules (0.21).

scaling = alpha / r, or alpha / sqrt(r) with rsLoRA. rank_pattern and alpha_pattern count by first match. The layout of
a weight follows from the base's shape, whatever `fan_in_fan_out` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from duat_cli.loading.adapter.base_weights import Place
from duat_cli.loading.adapter.folder import ADAPTER_CONFIG, AdapterFiles, names, number
from duat_cli.loading.adapter.keys import Target
from duat_cli.loading.adapter.parameter import Kind, ParameterPlan, Wrapped, fault, stated
from duat_cli.text import listed, shown

_MUTATED = ("pissa", "olora", "corda", "lora_ga", "loftq")


def lora(one: Wrapped) -> Iterator[ParameterPlan]:
    adapter, parts, name = one.adapter, one.target.parts, one.target.module
    rank, features_in, features_out = one.pair("lora_A", "lora_B")
    place = one.find("weight")
    inputs_first = _layout(one, place, features_in, features_out)
    adaptive = adapter.method == "ADALORA"
    scaling = _adalora_scale(one, rank) if adaptive else _scaling(adapter, name, rank)
    dora = _is_dora(one, features_out)
    mutated = None if adaptive else _mutation(adapter)
    if mutated == "olora" and inputs_first:
        raise one.fault("config", ": init_lora_weights olora on a Conv1D, which PEFT cannot do")
    kind: Kind = "dora" if dora else "adalora" if adaptive else "lora"
    weight = one.plan(kind, place, rank=rank, scaling=scaling, inputs_first=inputs_first, mutated=mutated)
    yield weight
    if "lora_B.bias" in parts:
        bias, delta = one.find("bias", needed=False), {"delta": parts["lora_B.bias"]}
        one.require_length("lora_B.bias", features_out)
        yield ParameterPlan(weight.module, f"{weight.module}.bias", "bias", delta, scaling=scaling, place=bias)


def embedding(one: Wrapped) -> ParameterPlan:
    """LoRA of an embedding, from A (r, vocabulary) and B (width, r): the stored (vocabulary, width) table changes by
    scaling Aᵀ Bᵀ."""
    rank, vocabulary, width = one.pair("lora_embedding_A", "lora_embedding_B")
    place = one.find("weight")
    if place is not None and place.shape != (vocabulary, width):
        one.require_rows(place, vocabulary, width)
        raise one.fault("shape-mismatch", f": shape mismatch, the adapter's table is {[vocabulary, width]}, the base's "
                        f"{list(place.shape)}")  # fmt: skip
    kind: Kind = "embedding dora" if _is_dora(one, width) else "embedding lora"
    scaling = _scaling(one.adapter, one.target.module, rank)
    return one.plan(kind, place, rank=rank, scaling=scaling, inputs_first=True)


def parameter_leaves(one: Wrapped, siblings: list[Target]) -> list[str]:
    """Parameters of the target's module that target_parameters asks for; empty where the target is an ordinary module.

    The keys name the module, not the parameter. PEFT takes every parameter whose name ends in an entry of the field.
    Without a base, an entry without a module counts for a module that is wrapped more than once.
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
    """LoRA on a parameter (E, ., .): A (E r, in) is ordered by experts, B (out, r E) by ranks."""
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
    if len({leaf for leaf, _, _ in fitting}) > 1:  # several of one shape: PEFT wraps the module's first parameter first
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
    scaling = _scaling(adapter, f"{target.module}.{leaf}", rank)
    module = place.parameter.rpartition(".")[0]
    return ParameterPlan(module, f"{module}.{leaf}", "expert lora", target.parts, rank, scaling, turned, experts, place)


def _layout(one: Wrapped, place: Place | None, into: int, out: int) -> bool:
    """Whether the base stores the weight as (in, out): by its shape, or for a square weight by its neighbours or the
    config."""
    if place is None or place.shape == (out, into) == (into, out):
        return one.square_inputs_first(place)
    if place.shape not in ((out, into), (into, out)):
        one.require_rows(place, out, into)
        raise one.fault("shape-mismatch", f": shape mismatch, the adapter maps {into} to {out} features (lora_A, "
                        f"lora_B), the base's weight is {list(place.shape)}: it belongs to another base "
                        "model")  # fmt: skip
    return place.shape == (into, out)


def _scaling(adapter: AdapterFiles, name: str, rank: int) -> float:
    r = stated(adapter, "rank_pattern", "r", name)
    if r != rank:
        raise fault(adapter, "rank-mismatch", f"{shown(name)}: {ADAPTER_CONFIG} says rank {r:g}, the "
                     f"tensors have {rank}: alpha / r would be wrong")  # fmt: skip
    alpha = stated(adapter, "alpha_pattern", "lora_alpha", name)
    return alpha / math.sqrt(rank) if adapter.config.get("use_rslora") else alpha / rank


def _adalora_scale(one: Wrapped, rank: int) -> float:
    """AdaLoRA's scaling, lora_alpha / (ranknum + 1e-5). In PEFT, ranknum stays at init_r when ranks are pruned."""
    if "lora_E" not in one.target.parts:
        raise one.fault("factor-missing", " has lora_A and no lora_E")
    if one.shape("lora_E") != (rank, 1):
        raise one.fault("shape-mismatch", f": lora_E is not of shape [{rank}, 1]")
    initial = number(one.adapter, "init_r", 12, 1)
    alpha = number(one.adapter, "lora_alpha", 8)
    return (alpha if alpha > 0 else rank) / (initial + 1e-5)


def _is_dora(one: Wrapped, length: int) -> bool:
    has = "lora_magnitude_vector" in one.target.parts
    if one.adapter.config.get("use_dora") and not has:
        raise one.fault("dora-magnitude-missing", ": use_dora is true, but lora_magnitude_vector is missing: the file "
                        "holds half of the change")  # fmt: skip
    if has and not one.adapter.config.get("use_dora"):
        raise one.fault("dora-flag-missing", " has a lora_magnitude_vector, but use_dora is not true: PEFT would drop "
                        "it")  # fmt: skip
    if has:
        one.require_length("lora_magnitude_vector", length)
    return has


def _mutation(adapter: AdapterFiles) -> str | None:
    init = str(adapter.config.get("init_lora_weights")).lower()
    return next((init for word in _MUTATED if init.startswith(word)), None)
