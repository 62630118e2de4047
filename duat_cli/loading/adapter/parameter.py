"""One parameter that an adapter changes, and what the readers of all methods share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.base_weights import VOCABULARY, BaseWeights, Place
from duat_cli.loading.adapter.folder import AdapterFiles, number, patterns
from duat_cli.loading.adapter.keys import Target, matching
from duat_cli.loading.checkpoint.files import kind
from duat_cli.text import clean, shown

Kind = Literal[
    "lora", "dora", "embedding lora", "embedding dora", "expert lora", "adalora", "ia3", "loha", "lokr",
    "trainable tokens", "saved", "bias", "full",
]  # fmt: skip


class AdapterFault(CheckpointError):  # noqa: N818 - a finding as well
    """A fault by which a part of an adapter has no meaning; `rule` is its id in the linter."""

    def __init__(self, rule: str, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")
        self.rule, self.where, self.text = rule, where, text


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter that the adapter changes, and how."""

    module: str
    """The base's module, which holds the parameter."""
    parameter: str
    kind: Kind
    parts: dict[str, str]
    """Part -> key of its tensor in the adapter."""
    rank: int | None = None
    scaling: float | None = None
    inputs_first: bool = False
    """Whether the base stores the weight as (in, out)."""
    experts: int = 1
    place: Place | None = None
    """The parameter's place in the base; None where the base was not looked at or lacks it."""
    mutated: str | None = None
    """The initialisation that subtracted the first B A from the base (PiSSA and its kin)."""
    tokens: tuple[int, ...] = ()

    @property
    def recomputed(self) -> bool:
        """Whether that first B A follows from the base's values; it is then taken out again."""
        return self.mutated in ("pissa", "olora")

    @property
    def other_base(self) -> str | None:
        """The initialisation, where its first B A does not follow from the base's values: the change is then relative
        to a base that is not in the files."""
        return None if self.recomputed else self.mutated

    @property
    def needs_base(self) -> bool:
        """Whether the change cannot be known without the base's values."""
        return (
            self.kind in ("dora", "embedding dora", "ia3", "trainable tokens", "saved")
            or (self.kind == "bias" and "saved" in self.parts)
            or self.recomputed
        )


@dataclass(frozen=True)
class Wrapped:
    """One module that an adapter's tuner wraps."""

    adapter: AdapterFiles
    target: Target
    base: BaseWeights | None
    """The base; None where the adapter is read alone."""

    def fault(self, rule: str, text: str) -> AdapterFault:
        """A fault of this module. text: the message behind the module's name."""
        return fault(self.adapter, rule, f"{shown(self.target.module)}{text}")

    def shape(self, part: str) -> tuple[int, ...]:
        return self.adapter.tensors[self.target.parts[part]].shape

    def pair(self, a: str, b: str) -> tuple[int, int, int]:
        """(rank, in, out) of a pair of factors A (r, in), B (out, r)."""
        for part, other in ((a, b), (b, a)):
            if part not in self.target.parts:
                raise self.fault("factor-missing", f" has {other} and no {part}")
        first, second = self.shape(a), self.shape(b)
        if len(first) > 2:
            raise self.fault("convolution", f": {a} {list(first)} is of a convolution, which is not supported")
        if len(first) != 2 or len(second) != 2:
            raise self.fault("shape-mismatch", f": {a} {list(first)} and {b} {list(second)}: expected two matrices; "
                             "were sharded weights saved without being gathered?")  # fmt: skip
        if first[0] != second[1]:
            raise self.fault("shape-mismatch", f": {a} {list(first)} and {b} {list(second)} have different ranks")
        return first[0], first[1], second[0]

    def require_length(self, part: str, length: int) -> None:
        shape = self.shape(part)
        if math.prod(shape) != length:
            raise self.fault("shape-mismatch", f": {part} {list(shape)}, expected {length} values")

    def require_rows(self, place: Place, rows: int, width: int) -> None:
        """Refuses a table (rows, width) of a resized vocabulary, since only the base's rows are at hand."""
        stored = place.shape
        if self.target.module.rpartition(".")[2] in VOCABULARY and stored[1:] == (width,) and stored[0] != rows:
            raise self.fault("shape-mismatch", f": the vocabulary was resized, from the base's {stored[0]} rows to "
                             f"{rows}: LoRA on a resized table is not read; merge it with PEFT and compare the merged "
                             "checkpoint")  # fmt: skip

    def find(self, leaf: str, *, needed: bool = True) -> Place | None:
        """The place of the base's tensor of that name in the module."""
        if self.base is None:
            return None
        place = self.base.find(f"{replicated(self.adapter, self.target.module)}.{leaf}", load=needed)
        if place is None and needed:
            raise self.fault("target-absent", f": the base {shown(self.base.source.name)} has no such module: the "
                             "adapter belongs to another base model")  # fmt: skip
        return place

    def plan(self, kind: Kind, place: Place | None, **known: Any) -> ParameterPlan:
        """The plan of the module's weight, which is at `place`, with all parts of the target. known: the plan's other
        fields. The module has the base's own name if that is longer; a replicated layer keeps its own."""
        module = self.target.module
        if place is not None and place.parameter.endswith(f".{module}.weight"):
            module = place.parameter.rpartition(".")[0]
        return ParameterPlan(module, f"{module}.weight", kind, self.target.parts, place=place, **known)

    def square_inputs_first(self, place: Place | None) -> bool:
        """Whether a weight whose shape does not show it is stored as (in, out): as its neighbours are, else as the
        config says, unless the class of the layer shows that it is not, as PEFT too goes by the class."""
        known = None if place is None or self.base is None else self.base.is_transposed(place.tensor)
        if known is None and self.adapter.config.get("fan_in_fan_out") is True:
            known = self.base.layer_is_transposed(self.target.module) if self.base is not None else None
            return known is not False
        return bool(known)


def stated(adapter: AdapterFiles, pattern: str, field: str, name: str) -> float:
    """A rank or alpha: from the first pattern that matches, else from the config. PEFT's default is 8 for both."""
    listed_for = patterns(adapter, pattern)
    key = matching(list(listed_for), name)
    value = number(adapter, field, 8) if key is None else listed_for[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise fault(adapter, "config", f"{pattern} {shown(key)}: expected a number, got {kind(value)}")
    if field == "r" and (value < 1 or value != int(value)):
        raise fault(adapter, "config", f"{field} of {shown(name)}: expected a whole number above 0, got {value:g}")
    return float(value)


def replicated(adapter: AdapterFiles, name: str) -> str:
    """The base's name of a module, in a model whose layers `layer_replication` repeats."""
    ranges = adapter.config.get("layer_replication")
    if not ranges:
        return name
    try:
        layers = [layer for first, last in ranges for layer in range(first, last)]
        return re.sub(r"\.(layers|layer|h)\.(\d+)\.", lambda m: f".{m[1]}.{layers[int(m[2])]}.", name, count=1)
    except (TypeError, ValueError, IndexError) as error:
        raise fault(adapter, "config", f"layer_replication: {shown(ranges)} does not reach {shown(name)}") from error


def fault(adapter: AdapterFiles, rule: str, text: str) -> AdapterFault:
    return AdapterFault(rule, clean(str(adapter.where)), text)
