"""How each tensor of an adapter changes a base parameter: method, rank, scale, layout; from headers alone.

The rules are PEFT's own (0.21): scaling = alpha / r, or alpha / sqrt(r) with rsLoRA; rank_pattern and
alpha_pattern by first match; the layout of a weight by the base's shape, whatever `fan_in_fan_out` says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter import ADAPTER_CONFIG, AdapterFiles, names, number, patterns
from duat_cli.loading.adapter_keys import Keys, Target, matching
from duat_cli.loading.base_weights import BaseWeights, Place
from duat_cli.loading.files import kind
from duat_cli.loading.wording import listed, shown
from duat_cli.text import clean

Kind = Literal[
    "lora", "dora", "embedding lora", "embedding dora", "expert lora", "adalora", "ia3", "loha", "lokr",
    "trainable tokens", "saved", "bias", "full",
]  # fmt: skip
_MUTATED = ("pissa", "olora", "corda", "lora_ga", "loftq")


class AdapterFault(CheckpointError):  # noqa: N818 - a finding as well
    """What keeps a part of an adapter from having a meaning; `rule` is its id in the linter."""

    def __init__(self, rule: str, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")
        self.rule, self.where, self.text = rule, where, text


@dataclass(frozen=True)
class Plan:
    """One parameter that the adapter changes, and how."""

    module: str
    """The base's module; of a parameter that is no weight or bias, the module that holds it."""
    parameter: str
    kind: Kind
    parts: dict[str, str]
    """Part -> key of its tensor in the adapter."""
    rank: int | None = None
    scaling: float | None = None
    inputs_first: bool = False
    """Whether the base stores it as (in, out)."""
    experts: int = 1
    place: Place | None = None
    """Its base tensor; None where the base was not looked at or has none."""
    mutated: str | None = None
    """The initialisation that subtracted the first B A from the base (PiSSA and its kin)."""
    tokens: tuple[int, ...] = ()

    @property
    def needs_base(self) -> bool:
        """Whether the change cannot be known without the base's values."""
        return (
            self.kind in ("dora", "embedding dora", "ia3", "trainable tokens", "saved")
            or (self.kind == "bias" and "saved" in self.parts)
            or self.mutated in ("pissa", "olora")
        )


def plans(adapter: AdapterFiles, keys: Keys, base: BaseWeights | None) -> Iterator[Plan | AdapterFault]:
    """A plan, or what is wrong, for every parameter the adapter touches; base: None looks at the adapter alone."""
    by_module: dict[str, list[Target]] = {}
    for target in keys.targets:
        by_module.setdefault(target.module, []).append(target)
    for target in keys.targets:
        try:
            yield from _planned(adapter, target, by_module[target.module], base)
        except AdapterFault as fault:
            yield fault
    for parameter, key in keys.saved.items():
        yield _saved(adapter, parameter, key, base)


def _planned(adapter: AdapterFiles, target: Target, siblings: list[Target], base: BaseWeights | None) -> Iterator[Plan]:
    if "trainable_tokens_delta" in target.parts:
        yield _tokens(adapter, target, base)
    elif adapter.method == "LORA" and "lora_embedding_A" in target.parts:
        yield _embedding(adapter, target, base)
    elif adapter.method == "LORA" and _is_parameter(adapter, target, siblings):
        yield _experts(adapter, target, siblings, base)
    elif adapter.method in ("LORA", "ADALORA"):
        yield from _lora(adapter, target, base)
    elif adapter.method == "IA3":
        yield from _ia3(adapter, target, base)
    elif adapter.method in ("LOHA", "LOKR"):
        yield _lycoris(adapter, target, base)
    else:
        raise _fault(adapter, "unknown-tensor", f"{shown(target.module)}: {listed(list(target.parts))} do not belong "
                     f"to a {adapter.method} adapter")  # fmt: skip


# --- LoRA, DoRA, AdaLoRA ----------------------------------------------------------------------------


def _lora(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> Iterator[Plan]:
    rank, features_in, features_out = _pair(adapter, target, "lora_A", "lora_B")
    place = _find(adapter, base, target.module, "weight")
    inputs_first = _layout(adapter, base, place, target, features_in, features_out)
    if adapter.method == "ADALORA":
        scaling = _adalora_scale(adapter, target, rank)
    else:
        scaling = _scaling(adapter, target.module, rank)
    dora = _is_dora(adapter, target, features_out)
    module = _module(place, target.module)
    kind: Kind = "dora" if dora else "adalora" if adapter.method == "ADALORA" else "lora"
    yield Plan(
        module, f"{module}.weight", kind, target.parts, rank, scaling, inputs_first,
        place=place, mutated=None if adapter.method == "ADALORA" else _mutation(adapter),
    )  # fmt: skip
    if "lora_B.bias" in target.parts:
        bias = _find(adapter, base, target.module, "bias", needed=False)
        _check_length(adapter, target, "lora_B.bias", features_out)
        yield Plan(module, f"{module}.bias", "bias", {"delta": target.parts["lora_B.bias"]}, None, scaling, place=bias)


def _pair(adapter: AdapterFiles, target: Target, a: str, b: str) -> tuple[int, int, int]:
    """(rank, in, out) of a pair of factors A (r, in), B (out, r)."""
    for part, other in ((a, b), (b, a)):
        if part not in target.parts:
            raise _fault(adapter, "factor-missing", f"{shown(target.module)} has {other} and no {part}")
    first, second = _shape(adapter, target, a), _shape(adapter, target, b)
    if len(first) != 2 or len(second) != 2:
        if len(first) > 2:
            raise _fault(adapter, "convolution", f"{shown(target.module)}: {a} {list(first)} is of a convolution, "
                         "which is not supported")  # fmt: skip
        raise _fault(adapter, "shape-mismatch", f"{shown(target.module)}: {a} {list(first)} and {b} {list(second)}: "
                     "expected two matrices; were sharded weights saved without being gathered?")  # fmt: skip
    if first[0] != second[1]:
        raise _fault(adapter, "shape-mismatch", f"{shown(target.module)}: {a} {list(first)} and {b} {list(second)} "
                     "have different ranks")  # fmt: skip
    return first[0], first[1], second[0]


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
        raise _fault(
            adapter, "shape-mismatch",
            f"{shown(target.module)}: shape mismatch, the adapter maps {into} to {out} features (lora_A, lora_B), "
            f"the base's weight is {list(place.shape)}: it belongs to another base model",
        )  # fmt: skip
    return place.shape == (into, out)


def _scaling(adapter: AdapterFiles, name: str, rank: int) -> float:
    stated = patterns(adapter, "rank_pattern")
    key = matching(list(stated), name)
    r = number(adapter, "r", 8, 1) if key is None else stated[key]
    if r != rank:
        where = f"rank_pattern {shown(key)}" if key is not None else "r"
        raise _fault(adapter, "rank-mismatch", f"{shown(name)}: {ADAPTER_CONFIG} says rank {shown(r)} ({where}), "
                     f"the tensors have {rank}: alpha / r would be wrong")  # fmt: skip
    stated = patterns(adapter, "alpha_pattern")
    key = matching(list(stated), name)
    alpha = number(adapter, "lora_alpha", 8) if key is None else stated[key]
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise _fault(adapter, "config", f"alpha_pattern {shown(key)}: expected a number, got {kind(alpha)}")
    return alpha / math.sqrt(rank) if adapter.config.get("use_rslora") else alpha / rank


def _adalora_scale(adapter: AdapterFiles, target: Target, rank: int) -> float:
    """lora_alpha / (ranknum + 1e-5); ranknum stays at init_r when ranks are pruned, as PEFT has it."""
    if "lora_E" not in target.parts:
        raise _fault(adapter, "factor-missing", f"{shown(target.module)} has lora_A and no lora_E")
    if _shape(adapter, target, "lora_E") != (rank, 1):
        raise _fault(adapter, "shape-mismatch", f"{shown(target.module)}: lora_E is not of shape [{rank}, 1]")
    initial = number(adapter, "init_r", 12, 1)
    alpha = number(adapter, "lora_alpha", 8)
    return (alpha if alpha > 0 else rank) / (initial + 1e-5)


def _is_dora(adapter: AdapterFiles, target: Target, length: int) -> bool:
    has = "lora_magnitude_vector" in target.parts
    if adapter.config.get("use_dora") and not has:
        raise _fault(adapter, "dora-magnitude-missing", f"{shown(target.module)}: use_dora is true, but "
                     "lora_magnitude_vector is missing: the file holds half of the change")  # fmt: skip
    if has and not adapter.config.get("use_dora"):
        raise _fault(adapter, "dora-flag-missing", f"{shown(target.module)} has a lora_magnitude_vector, but use_dora "
                     "is not true: PEFT would drop it")  # fmt: skip
    if has:
        _check_length(adapter, target, "lora_magnitude_vector", length)
    return has


def _mutation(adapter: AdapterFiles) -> str | None:
    init = str(adapter.config.get("init_lora_weights")).lower()
    return next((init for word in _MUTATED if init.startswith(word)), None)


def _embedding(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> Plan:
    """A (r, vocabulary), B (width, r): the stored (vocabulary, width) table changes by scaling Aᵀ Bᵀ."""
    rank, vocabulary, width = _pair(adapter, target, "lora_embedding_A", "lora_embedding_B")
    place = _find(adapter, base, target.module, "weight")
    if place is not None and place.shape != (vocabulary, width):
        raise _fault(adapter, "shape-mismatch", f"{shown(target.module)}: shape mismatch, the adapter's table is "
                     f"{[vocabulary, width]}, the base's {list(place.shape)}")  # fmt: skip
    dora = _is_dora(adapter, target, width)
    module = _module(place, target.module)
    return Plan(
        module, f"{module}.weight", "embedding dora" if dora else "embedding lora", target.parts, rank,
        _scaling(adapter, target.module, rank), True, place=place,
    )  # fmt: skip


# --- parameters, experts ------------------------------------------------------------------------------


def _is_parameter(adapter: AdapterFiles, target: Target, siblings: list[Target]) -> bool:
    """Whether the target is one of target_parameters, which wrap a module that has no weight to speak of."""
    wanted = names(adapter, "target_parameters")
    return bool(wanted) and (len(siblings) > 1 or bool(_candidates(wanted, target.module)))


def _candidates(wanted: list[str], module: str) -> list[str]:
    """Parameter names of a module that target_parameters ask for, in PEFT's order of nesting: the outermost last."""
    found = []
    for name in wanted:
        holder, _, leaf = name.rpartition(".")
        if module == holder or module.endswith("." + holder) or not holder:
            found.append(leaf)
    return sorted(set(found))


def _experts(adapter: AdapterFiles, target: Target, siblings: list[Target], base: BaseWeights | None) -> Plan:
    """LoRA on a parameter (E, ., .): A (E r, in) by experts, B (out, r E) by ranks; the key names no parameter."""
    both, into, out = _pair(adapter, target, "lora_A", "lora_B")
    leaves = _candidates(names(adapter, "target_parameters"), target.module)
    if base is None:
        raise _fault(adapter, "needs-base", f"{shown(target.module)}: its tensors name no parameter; the base's shapes "
                     "are needed to tell")  # fmt: skip
    fitting: list[tuple[str, Place, bool]] = []
    for leaf in leaves:
        place = base.find(f"{target.module}.{leaf}")
        if place is None:
            raise _fault(adapter, "target-absent", f"target_parameters: the base has no {shown(target.module)}.{leaf}")
        shape = place.shape if len(place.shape) == 3 else (1, *place.shape)
        if len(shape) == 3 and both % shape[0] == 0:
            layouts = {False: (out, into), True: (into, out)}
            fitting += [(leaf, place, turned) for turned, sides in layouts.items() if shape[1:] == sides]
    if len({leaf for leaf, _, _ in fitting}) > 1:  # of one shape: PEFT wraps the module's first parameter first
        order = [n.rpartition(".")[2] for n in _declared(base, target.module) if n.rpartition(".")[2] in leaves]
        depth = sorted({t.depth for t in siblings}, reverse=True)
        at = depth.index(target.depth)
        fitting = [f for f in fitting if len(order) == len(depth) and f[0] == order[at]]
    if not fitting:
        raise _fault(adapter, "shape-mismatch", f"{shown(target.module)}: lora_A, lora_B map {into} to {out} features, "
                     f"which is the shape of none of {listed(leaves)} in the base")  # fmt: skip
    if len(fitting) > 1:
        raise _fault(adapter, "ambiguous-layout", f"{shown(target.module)}.{fitting[0][0]}: a square parameter; shapes "
                     "do not tell which side of it is the input")  # fmt: skip
    leaf, place, turned = fitting[0]
    experts = place.shape[0] if len(place.shape) == 3 else 1
    rank = both // experts
    scaling = _scaling(adapter, f"{target.module}.{leaf}", rank)
    module = place.parameter.rpartition(".")[0]
    return Plan(module, f"{module}.{leaf}", "expert lora", target.parts, rank, scaling, turned, experts, place)


def _declared(base: BaseWeights, module: str) -> list[str]:
    """The module's parameters in the order in which its class declares them."""
    return [name for name in base.parameters() if name.rpartition(".")[0] == module]


# --- IA3, LoHa, LoKr, trainable tokens, saved values --------------------------------------------------------


def _ia3(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> Iterator[Plan]:
    """A factor for every output, or, of a feed-forward layer, for every input."""
    place = _find(adapter, base, target.module, "weight")
    shape = _shape(adapter, target, "ia3_l")
    if len(shape) != 2 or 1 not in shape:
        raise _fault(
            adapter, "shape-mismatch", f"{shown(target.module)}: ia3_l {list(shape)}: expected one row or column"
        )
    module = _module(place, target.module)
    by_input = shape[0] == 1 and shape[1] != 1
    inputs_first = False
    if place is not None and base is not None:
        length = max(shape)
        sides = place.shape  # of (out, in) the inputs are side 1
        fits = [turned for turned in (False, True) if sides[int(by_input != turned)] == length]
        if not fits:
            raise _fault(adapter, "shape-mismatch", f"{shown(target.module)}: shape mismatch, ia3_l {list(shape)}, the "
                         f"base's weight is {list(sides)}")  # fmt: skip
        known = base.is_transposed(place.tensor)
        stated = adapter.config.get("fan_in_fan_out") is True if known is None else known
        inputs_first = fits[0] if len(fits) == 1 else stated
    yield Plan(module, f"{module}.weight", "ia3", target.parts, None, None, inputs_first, place=place)
    bias = None if by_input else _find(adapter, base, target.module, "bias", needed=False)
    if bias is not None:
        yield Plan(module, f"{module}.bias", "ia3", target.parts, None, None, place=bias)


def _lycoris(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> Plan:
    """scaling = alpha / r with the config's rank, since LoKr may store a factor whole."""
    if any(part.endswith(("_t1", "_t2")) for part in target.parts):
        raise _fault(adapter, "convolution", f"{shown(target.module)}: a convolution, which is not supported")
    kind: Kind = "loha" if adapter.method == "LOHA" else "lokr"
    _check_lycoris(adapter, target, kind)
    place = _find(adapter, base, target.module, "weight")
    stated = patterns(adapter, "rank_pattern")
    key = matching(list(stated), target.module)
    rank = int(number(adapter, "r", 8, 1) if key is None else stated[key])
    stated = patterns(adapter, "alpha_pattern")
    key = matching(list(stated), target.module)
    alpha = number(adapter, "alpha", 8) if key is None else stated[key]
    module = _module(place, target.module)
    return Plan(module, f"{module}.weight", kind, target.parts, rank, alpha / rank, False, place=place)


def _check_lycoris(adapter: AdapterFiles, target: Target, kind: str) -> None:
    wanted = (
        [("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b")]
        if kind == "loha"
        else [("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"), ("lokr_w2",), ("lokr_w2_a", "lokr_w2_b")]
    )
    have = [all(part in target.parts for part in group) for group in wanted]
    whole = all(have) if kind == "loha" else (have[0] or have[1]) and (have[2] or have[3])
    if not whole:
        raise _fault(adapter, "factor-missing", f"{shown(target.module)}: {listed(list(target.parts))} are not all "
                     f"factors of a {adapter.method} change")  # fmt: skip


def _tokens(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> Plan:
    """Rows that replace the embedding's rows of the named tokens."""
    place = _find(adapter, base, target.module, "weight")
    rows = _shape(adapter, target, "trainable_tokens_delta")
    stated = adapter.config.get("token_indices") or adapter.config.get("trainable_token_indices")
    if isinstance(stated, dict):
        stated = next((v for k, v in stated.items() if (target.module == k or target.module.endswith("." + k))), None)
    if not (isinstance(stated, list) and all(type(i) is int and i >= 0 for i in stated)):
        raise _fault(
            adapter, "config", f"{shown(target.module)}: {ADAPTER_CONFIG} names no list of token indices for it"
        )
    if len(rows) != 2 or rows[0] != len(stated):
        raise _fault(
            adapter, "shape-mismatch", f"{shown(target.module)}: {len(stated)} token indices, but rows {list(rows)}"
        )
    if place is not None and (place.shape[1:] != rows[1:] or max(stated, default=0) >= place.shape[0]):
        raise _fault(adapter, "shape-mismatch", f"{shown(target.module)}: shape mismatch, rows {list(rows)} to token "
                     f"{max(stated, default=0)}, the base's table is {list(place.shape)}")  # fmt: skip
    module = _module(place, target.module)
    return Plan(
        module, f"{module}.weight", "trainable tokens", target.parts, len(stated), None, True,
        place=place, tokens=tuple(stated),
    )  # fmt: skip


def _saved(adapter: AdapterFiles, parameter: str, key: str, base: BaseWeights | None) -> Plan | AdapterFault:
    """A value that replaces the base's, whole."""
    module, _, leaf = parameter.rpartition(".")
    kind: Kind = "bias" if leaf == "bias" else "saved"
    place = None if base is None else base.find(_replicated(adapter, parameter))
    shape = adapter.tensors[key].shape
    if place is not None and (len(place.shape) != len(shape) or place.shape[1:] != shape[1:]):
        return _fault(adapter, "shape-mismatch", f"{shown(parameter)}: shape mismatch, the adapter has {list(shape)}, "
                      f"the base has {list(place.shape)}")  # fmt: skip
    name = place.parameter if place is not None else parameter
    return Plan(_module_of(name) or module, name, kind, {"saved": key}, place=place, inputs_first="embed" in module)


# --- shared ---------------------------------------------------------------------------------------------


def _find(
    adapter: AdapterFiles, base: BaseWeights | None, module: str, leaf: str, *, needed: bool = True
) -> Place | None:
    if base is None:
        return None
    place = base.find(f"{_replicated(adapter, module)}.{leaf}", load=needed)
    if place is None and needed:
        raise _fault(adapter, "target-absent", f"{shown(module)}: the base {shown(base.source.name)} has no such "
                     "module: the adapter belongs to another base model")  # fmt: skip
    return place


def _replicated(adapter: AdapterFiles, name: str) -> str:
    """The base's name of a module of a model whose layers `layer_replication` repeats."""
    ranges = adapter.config.get("layer_replication")
    if not ranges:
        return name
    try:
        layers = [layer for first, last in ranges for layer in range(first, last)]
        return re.sub(r"\.(layers|layer|h)\.(\d+)\.", lambda m: f".{m[1]}.{layers[int(m[2])]}.", name, count=1)
    except (TypeError, ValueError, IndexError) as error:
        raise _fault(adapter, "config", f"layer_replication: {shown(ranges)} does not reach {shown(name)}") from error


def _module(place: Place | None, module: str) -> str:
    """The base's own name where it is the longer one; a replicated layer keeps its own."""
    if place is None or not place.parameter.endswith("." + module + ".weight"):
        return module
    return _module_of(place.parameter)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _shape(adapter: AdapterFiles, target: Target, part: str) -> tuple[int, ...]:
    return adapter.tensors[target.parts[part]].shape


def _check_length(adapter: AdapterFiles, target: Target, part: str, length: int) -> None:
    shape = _shape(adapter, target, part)
    if math.prod(shape) != length:
        raise _fault(
            adapter, "shape-mismatch", f"{shown(target.module)}: {part} {list(shape)}, expected {length} values"
        )


def _fault(adapter: AdapterFiles, rule: str, text: str) -> AdapterFault:
    return AdapterFault(rule, clean(str(adapter.where)), text)
