"""How each tensor of an adapter changes a base parameter, from headers alone: which method reads which tensors."""

from __future__ import annotations

from collections.abc import Iterator

from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.experts import experts, parameter_leaves
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.adapter.keys import Keys, Target
from duat_cli.loading.adapter.lora import embedding, lora
from duat_cli.loading.adapter.others import ia3, lycoris, saved, tokens
from duat_cli.loading.adapter.parameter import AdapterFault, ParameterPlan, fault
from duat_cli.text import listed, shown


def plans(adapter: AdapterFiles, keys: Keys, base: BaseWeights | None) -> Iterator[ParameterPlan | AdapterFault]:
    """A plan, or what is wrong, for every parameter the adapter touches; base: None looks at the adapter alone."""
    by_module: dict[str, list[Target]] = {}
    for target in keys.targets:
        by_module.setdefault(target.module, []).append(target)
    for target in keys.targets:
        try:
            yield from _planned(adapter, target, by_module[target.module], base)
        except AdapterFault as wrong:
            yield wrong
    for parameter, key in keys.saved.items():
        yield saved(adapter, parameter, key, base)


def _planned(
    adapter: AdapterFiles, target: Target, siblings: list[Target], base: BaseWeights | None
) -> Iterator[ParameterPlan]:
    if "trainable_tokens_delta" in target.parts:
        yield tokens(adapter, target, base)
    elif adapter.method == "LORA" and "lora_embedding_A" in target.parts:
        yield embedding(adapter, target, base)
    elif adapter.method == "LORA" and (leaves := parameter_leaves(adapter, target, siblings, base)):
        yield experts(adapter, target, siblings, leaves, base)
    elif adapter.method in ("LORA", "ADALORA"):
        yield from lora(adapter, target, base)
    elif adapter.method == "IA3":
        yield from ia3(adapter, target, base)
    elif adapter.method in ("LOHA", "LOKR"):
        yield lycoris(adapter, target, base)
    else:
        raise fault(adapter, "unknown-tensor", f"{shown(target.module)}: {listed(list(target.parts))} do not belong "
                     f"to a {adapter.method} adapter")  # fmt: skip
