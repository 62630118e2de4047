"""LoRA, DoRA and AdaLoRA on linear layers and embeddings: rank, scale, layout, by PEFT's rules (0.21).

scaling = alpha / r, or alpha / sqrt(r) with rsLoRA; rank_pattern and alpha_pattern by first match; the layout of a
weight by the base's shape, whatever `fan_in_fan_out` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from duat_cli.loading.adapter.base_weights import BaseWeights, Place
from duat_cli.loading.adapter.folder import ADAPTER_CONFIG, AdapterFiles, number
from duat_cli.loading.adapter.keys import Target
from duat_cli.loading.adapter.parameter import (
    Kind,
    ParameterPlan,
    check_length,
    fault,
    find,
    module_name,
    pair,
    shape_of,
    stated,
)
from duat_cli.text import shown

_MUTATED = ("pissa", "olora", "corda", "lora_ga", "loftq")


def lora(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> Iterator[ParameterPlan]:
    rank, features_in, features_out = pair(adapter, target, "lora_A", "lora_B")
    place = find(adapter, base, target.module, "weight")
    inputs_first = _layout(adapter, base, place, target, features_in, features_out)
    if adapter.method == "ADALORA":
        scaling = _adalora_scale(adapter, target, rank)
    else:
        scaling = scaling_of(adapter, target.module, rank)
    dora = is_dora(adapter, target, features_out)
    if adapter.method == "LORA" and _mutation(adapter) == "olora" and inputs_first:
        raise fault(
            adapter, "config", f"{shown(target.module)}: init_lora_weights olora on a Conv1D, which PEFT cannot do"
        )
    module = module_name(place, target.module)
    kind: Kind = "dora" if dora else "adalora" if adapter.method == "ADALORA" else "lora"
    yield ParameterPlan(
        module, f"{module}.weight", kind, target.parts, rank, scaling, inputs_first,
        place=place, mutated=None if adapter.method == "ADALORA" else _mutation(adapter),
    )  # fmt: skip
    if "lora_B.bias" in target.parts:
        bias = find(adapter, base, target.module, "bias", needed=False)
        check_length(adapter, target, "lora_B.bias", features_out)
        yield ParameterPlan(
            module, f"{module}.bias", "bias", {"delta": target.parts["lora_B.bias"]}, None, scaling, place=bias
        )


def embedding(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> ParameterPlan:
    """A (r, vocabulary), B (width, r): the stored (vocabulary, width) table changes by scaling Aᵀ Bᵀ."""
    rank, vocabulary, width = pair(adapter, target, "lora_embedding_A", "lora_embedding_B")
    place = find(adapter, base, target.module, "weight")
    if place is not None and place.shape != (vocabulary, width):
        raise fault(adapter, "shape-mismatch", f"{shown(target.module)}: shape mismatch, the adapter's table is "
                     f"{[vocabulary, width]}, the base's {list(place.shape)}")  # fmt: skip
    dora = is_dora(adapter, target, width)
    module = module_name(place, target.module)
    return ParameterPlan(
        module, f"{module}.weight", "embedding dora" if dora else "embedding lora", target.parts, rank,
        scaling_of(adapter, target.module, rank), True, place=place,
    )  # fmt: skip


def _layout(
    adapter: AdapterFiles, base: BaseWeights | None, place: Place | None, target: Target, into: int, out: int
) -> bool:
    """Whether the base stores the weight as (in, out): by its shape; a square one by its neighbours, then by config."""
    stated = adapter.config.get("fan_in_fan_out") is True
    if place is None or base is None:
        return stated
    if place.shape == (out, into) == (into, out):
        known = base.is_transposed(place.tensor)
        return stated if known is None else known
    if place.shape not in ((out, into), (into, out)):
        raise fault(
            adapter, "shape-mismatch",
            f"{shown(target.module)}: shape mismatch, the adapter maps {into} to {out} features (lora_A, lora_B), "
            f"the base's weight is {list(place.shape)}: it belongs to another base model",
        )  # fmt: skip
    return place.shape == (into, out)


def scaling_of(adapter: AdapterFiles, name: str, rank: int) -> float:
    r = stated(adapter, "rank_pattern", "r", name)
    if r != rank:
        raise fault(adapter, "rank-mismatch", f"{shown(name)}: {ADAPTER_CONFIG} says rank {r:g}, the "
                     f"tensors have {rank}: alpha / r would be wrong")  # fmt: skip
    alpha = stated(adapter, "alpha_pattern", "lora_alpha", name)
    return alpha / math.sqrt(rank) if adapter.config.get("use_rslora") else alpha / rank


def _adalora_scale(adapter: AdapterFiles, target: Target, rank: int) -> float:
    """lora_alpha / (ranknum + 1e-5); ranknum stays at init_r when ranks are pruned, as PEFT has it."""
    if "lora_E" not in target.parts:
        raise fault(adapter, "factor-missing", f"{shown(target.module)} has lora_A and no lora_E")
    if shape_of(adapter, target, "lora_E") != (rank, 1):
        raise fault(adapter, "shape-mismatch", f"{shown(target.module)}: lora_E is not of shape [{rank}, 1]")
    initial = number(adapter, "init_r", 12, 1)
    alpha = number(adapter, "lora_alpha", 8)
    return (alpha if alpha > 0 else rank) / (initial + 1e-5)


def is_dora(adapter: AdapterFiles, target: Target, length: int) -> bool:
    has = "lora_magnitude_vector" in target.parts
    if adapter.config.get("use_dora") and not has:
        raise fault(adapter, "dora-magnitude-missing", f"{shown(target.module)}: use_dora is true, but "
                     "lora_magnitude_vector is missing: the file holds half of the change")  # fmt: skip
    if has and not adapter.config.get("use_dora"):
        raise fault(adapter, "dora-flag-missing", f"{shown(target.module)} has a lora_magnitude_vector, but use_dora "
                     "is not true: PEFT would drop it")  # fmt: skip
    if has:
        check_length(adapter, target, "lora_magnitude_vector", length)
    return has


def _mutation(adapter: AdapterFiles) -> str | None:
    init = str(adapter.config.get("init_lora_weights")).lower()
    return next((init for word in _MUTATED if init.startswith(word)), None)
