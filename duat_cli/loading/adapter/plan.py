"""How each tensor of an adapter changes a base parameter, from headers alone. This module chooses the reader of each
tensor."""

from __future__ import annotations

from collections.abc import Iterator

from duat_cli.grouping import by_key
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.adapter.keys import Keys, Target
from duat_cli.loading.adapter.lora import embedding, experts, lora, parameter_leaves
from duat_cli.loading.adapter.others import ia3, lycoris, saved, tokens
from duat_cli.loading.adapter.parameter import AdapterFault, ParameterPlan, Wrapped
from duat_cli.text import listed


def plans(adapter: AdapterFiles, keys: Keys, base: BaseWeights | None) -> Iterator[ParameterPlan | AdapterFault]:
    """A plan, or a fault, for every parameter the adapter touches. base: None to read the adapter alone."""
    by_module = by_key((target.module, target) for target in keys.targets)
    for target in keys.targets:
        try:
            yield from _planned(Wrapped(adapter, target, base), by_module[target.module])
        except AdapterFault as wrong:
            yield wrong
    for parameter, key in keys.saved.items():
        yield saved(adapter, parameter, key, base)


def _planned(one: Wrapped, siblings: list[Target]) -> Iterator[ParameterPlan]:
    parts, method = one.target.parts, one.adapter.method
    if "trainable_tokens_delta" in parts:
        yield tokens(one)
    elif method == "LORA" and "lora_embedding_A" in parts:
        yield embedding(one)
    elif method == "LORA" and (leaves := parameter_leaves(one, siblings)):
        yield experts(one, siblings, leaves)
    elif method in ("LORA", "ADALORA"):
        yield from lora(one)
    elif method == "IA3" and "ia3_l" in parts:
        yield from ia3(one)
    elif method in ("LOHA", "LOKR"):
        yield lycoris(one)
    else:
        raise one.fault("unknown-tensor", f": {listed(list(parts))} do not belong to a {method} adapter")
