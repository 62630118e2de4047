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
    repeated = [] if base is None else _repeated(adapter, keys, base)
    for target in keys.targets:
        if target in repeated:
            continue
        try:
            yield from _planned(Wrapped(adapter, target, base), by_module[target.module])
        except AdapterFault as wrong:
            yield wrong
    for parameter, key in keys.saved.items():
        yield saved(adapter, parameter, key, base)


def _repeated(adapter: AdapterFiles, keys: Keys, base: BaseWeights) -> list[Target]:
    """Targets that PEFT's trainable tokens repeat: it writes the rows of a tied table under each name of the table, and
    applies them once. The first name in the model counts."""
    tables = [target for target in keys.targets if "trainable_tokens_delta" in target.parts]
    if adapter.method != "TRAINABLE_TOKENS" or len(tables) < 2:
        return []
    named = [(target, f"{target.module}.weight") for target in tables]
    first = {name: base.first_name(name) for _, name in named}
    counted = {full for name, full in first.items() if full.endswith(name)}
    return [target for target, name in named if first[name] in counted and not first[name].endswith(name)]


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
