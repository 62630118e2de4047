"""The exact change of each base parameter by an adapter, float64, in the layout in which the base stores it.

Changes of low-rank methods stay factors. Changes that depend on the base's values (DoRA, IA3, replaced rows and
modules) are dense differences. Every formula is PEFT's own merge, written as a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.errors import needed
from duat_cli.grouping import by_key
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.adapter.keys import Keys, read_keys
from duat_cli.loading.adapter.parameter import AdapterFault, ParameterPlan
from duat_cli.loading.adapter.plan import plans
from duat_cli.loading.checkpoint.reader import Reader
from duat_cli.operators.lowrank import LowRank, Piece, is_zero, nonfinite, singular, written_out
from duat_cli.text import natural, plural

Read = Callable[[str], Tensor]
_AS_SAVED = 1e-6  # relative error of a value that float32 computes from the base


@dataclass(frozen=True)
class Change:
    """Change of one parameter's value."""

    plan: ParameterPlan
    pieces: tuple[Piece, ...]
    """The change in the base's layout: a matrix or a vector, or one matrix for each expert of a stack. Empty where
    `fault` says why."""
    added_rows: int = 0
    """Rows of a resized vocabulary that the base lacks, as a number; the pieces do not hold them."""
    fault: str | None = None
    nonfinite: int = 0
    """How many values are NaN or infinite."""
    undefined: bool = False
    """Whether these are so only because DoRA divides by a norm of zero."""
    rounded: str = ""
    """The dtype that the base's values were rounded to, where that alters some of them; it counts as no change."""

    @property
    def is_zero(self) -> bool:
        return not self.fault and not self.added_rows and all(is_zero(piece) for piece in self.pieces)

    def dense(self) -> Tensor:
        """The change written out, in the base's shape."""
        written = [written_out(piece) for piece in self.pieces]
        whole = torch.stack(written) if len(written) > 1 else written[0]
        place = self.plan.place
        return whole.reshape(place.shape) if place is not None and whole.numel() == math.prod(place.shape) else whole


def adapter_tensors(adapter: AdapterFiles) -> Read:
    """Function that reads the adapter's tensors by key. Floats of one byte, which torch does not compute with, are read
    as float32, as PEFT loads them."""
    reader = Reader(adapter.weights)

    def read(key: str) -> Tensor:
        stored = reader.tensor(key)
        return stored.float() if stored.is_floating_point() and stored.element_size() == 1 else stored

    return read


@dataclass(frozen=True)
class Opened:
    """An adapter with its tensors at hand and its plans made."""

    adapter: AdapterFiles
    keys: Keys
    found: list[ParameterPlan | AdapterFault]
    read: Read

    @property
    def plans(self) -> list[ParameterPlan]:
        """The plans that have a meaning, block after block."""
        found = [plan for plan in self.found if isinstance(plan, ParameterPlan)]
        return sorted(found, key=lambda plan: natural(plan.parameter))

    @property
    def by_parameter(self) -> dict[str, list[ParameterPlan]]:
        """Parameter -> all plans that change it."""
        return by_key((plan.parameter, plan) for plan in self.plans)

    @property
    def unplaced(self) -> list[ParameterPlan]:
        """The plans of parameters that are saved whole and have no place in the base, such as a classifier's."""
        return [plan for plan in self.plans if plan.place is None and "saved" in plan.parts]

    @property
    def faults(self) -> list[AdapterFault]:
        """The reasons why other plans have no meaning."""
        return [fault for fault in self.found if isinstance(fault, AdapterFault)]


def opened(adapter: AdapterFiles, base: BaseWeights | None) -> Opened:
    """Reads the adapter's keys and makes its plans. base: as for `plans`."""
    keys = read_keys(adapter)
    return Opened(adapter, keys, list(plans(adapter, keys, base)), adapter_tensors(adapter))


def change_of(plan: ParameterPlan, read: Read, base: BaseWeights | None) -> Change:  # noqa: PLR0911 - one way out a kind
    """The change that a plan makes. base: None where its values must not be read."""
    parts = {part: read(key) for part, key in plan.parts.items()}
    bad = sum(nonfinite(tensor) for tensor in parts.values())
    if bad:
        values = "1 value that is" if bad == 1 else f"{bad} values that are"
        return Change(plan, (), fault=f"the adapter holds {values} NaN or infinite", nonfinite=bad)
    if plan.kind == "dora" and plan.other_base:
        return Change(
            plan, (), fault=f"DoRA on a base that {plan.other_base} changed: the magnitudes belong to that one"
        )
    if plan.needs_base and base is None:
        return Change(plan, (), fault="needs the base's values, which were not read")
    if plan.kind == "bias" and "delta" in plan.parts:  # from lora_bias
        return Change(plan, (parts["delta"].double() * needed(plan.scaling),))
    if plan.place is None and plan.needs_base:
        return Change(plan, (), fault=f"the base has no {plan.parameter}")
    stored = base.read(plan.place) if plan.needs_base and base is not None and plan.place is not None else None
    if stored is not None and (bad := nonfinite(stored)):
        return Change(plan, (), fault=f"the base holds {bad} values that are NaN or infinite", nonfinite=bad)
    if "saved" in parts:
        return replaced(plan, parts["saved"], needed(stored))
    if plan.kind == "trainable tokens":
        return _rows(plan, parts["trainable_tokens_delta"], needed(stored))
    wide = {name: tensor.double() for name, tensor in parts.items()}
    pieces = _FORMULAS[plan.kind](plan, wide, None if stored is None else stored.double())
    bad = sum(nonfinite(piece) for piece in pieces) if "dora" in plan.kind else 0
    if bad:
        fault = f"DoRA divides by a norm of zero: {plural(bad, 'value')} NaN"
        return Change(plan, (), fault=fault, nonfinite=bad, undefined=True)
    return Change(plan, pieces)


# --- low rank -----------------------------------------------------------------------------------------------


def _lora(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    """scaling B A. Where the initialisation took its own B A out of the base, the change is relative to the original
    base."""
    change = LowRank(parts["lora_B"] * needed(plan.scaling), parts["lora_A"])
    if stored is not None and plan.recomputed:
        initial = _initial(plan, stored.mT if plan.inputs_first else stored)
        moved = change.minus(initial)
        size = float(singular(initial).values.norm())
        untouched = float(singular(moved).values.norm()) <= _AS_SAVED * size
        change = LowRank(torch.zeros_like(change.left), change.right) if untouched else moved
    return (change.mT if plan.inputs_first else change,)


def _initial(plan: ParameterPlan, weight: Tensor) -> LowRank:
    """scaling B₀A₀ as PEFT subtracts it: PiSSA's leading singular part, OLoRA's leading part of QR times scaling.

    Computed in float32, as PEFT does: where singular values are close, another precision may cut at other directions.
    """
    rank, narrow = plan.rank or 0, weight.float()
    if plan.mutated == "pissa":
        u, s, vh = torch.linalg.svd(narrow, full_matrices=False)
        return LowRank((u[:, :rank] * s[:rank]).double(), vh[:rank].double())
    q, r = torch.linalg.qr(narrow)
    return LowRank(q[:, :rank].double() * needed(plan.scaling), r[:rank].double())


def _adalora(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    change = LowRank(parts["lora_B"] * needed(plan.scaling), parts["lora_A"] * parts["lora_E"])
    return (change.mT if plan.inputs_first else change,)


def _embedding(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    return (LowRank(parts["lora_embedding_A"].mT * needed(plan.scaling), parts["lora_embedding_B"].mT),)


def _experts(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    """scaling B A of each expert. A is (E r, in), an expert's rows one after another; B is (out, r E), the columns of
    all experts for one rank after another."""
    first = parts["lora_A"].reshape(plan.experts, -1, parts["lora_A"].shape[-1])  # (E, r, in)
    second = parts["lora_B"].reshape(parts["lora_B"].shape[0], -1, plan.experts)  # (out, r, E)
    changes = [LowRank(second[:, :, e] * needed(plan.scaling), first[e]) for e in range(plan.experts)]
    return tuple(change.mT if plan.inputs_first else change for change in changes)


def _loha(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    """scaling (w1a w1b) ∘ (w2a w2b), of rank r² at most: the row-wise Khatri-Rao product of the factors."""
    left = _rowwise(parts["hada_w1_a"], parts["hada_w2_a"]) * needed(plan.scaling)
    right = _rowwise(parts["hada_w1_b"].mT, parts["hada_w2_b"].mT).mT
    return (_narrow(LowRank(left, right)),)


def _rowwise(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, :, None] * b[:, None, :]).flatten(1)


def _lokr(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    """scaling w1 ⊗ w2: (A B) ⊗ (C D) = (A ⊗ C)(B ⊗ D)."""
    first = _factors(parts, "lokr_w1")
    second = _factors(parts, "lokr_w2")
    left = torch.kron(first.left.contiguous(), second.left.contiguous()) * needed(plan.scaling)
    return (_narrow(LowRank(left, torch.kron(first.right.contiguous(), second.right.contiguous()))),)


def _factors(parts: dict[str, Tensor], name: str) -> LowRank:
    if name in parts:
        whole = parts[name]
        rows, columns = whole.shape
        one = torch.eye(min(rows, columns), dtype=whole.dtype)
        return LowRank(whole, one) if rows >= columns else LowRank(one, whole)
    return LowRank(parts[f"{name}_a"], parts[f"{name}_b"])


def _narrow(change: LowRank) -> Piece:
    """The change as factors where these are smaller than the matrix, else written out."""
    return change if change.left.shape[1] < min(change.shape) else change.dense()


# --- from the base's values -----------------------------------------------------------------------------------


def _dora(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    """m / ‖W + ΔW‖ (W + ΔW) - W, norms over the inputs of each output."""
    assert stored is not None
    weight = stored.mT if plan.inputs_first else stored  # (out, in); of an embedding (width, vocabulary)
    start = weight - _initial(plan, weight).dense() if plan.recomputed else weight
    names = ("lora_embedding_B", "lora_embedding_A") if plan.kind == "embedding dora" else ("lora_B", "lora_A")
    moved = start + (parts[names[0]] * needed(plan.scaling)) @ parts[names[1]]
    factor = parts["lora_magnitude_vector"].flatten()[:, None] / moved.norm(dim=1, keepdim=True)
    if torch.equal(moved, weight) and bool(((factor - 1).abs() <= _AS_SAVED).all()):
        return (torch.zeros_like(stored),)  # untouched: the magnitudes are the base's own, but for rounding
    change = factor * moved - weight
    return (change.mT if plan.inputs_first else change,)


def _ia3(plan: ParameterPlan, parts: dict[str, Tensor], stored: Tensor | None) -> tuple[Piece, ...]:
    assert stored is not None
    factors = parts["ia3_l"]
    if stored.ndim == 1:
        return (stored * (factors.flatten() - 1),)
    factors = factors.mT if plan.inputs_first else factors
    return (stored * (factors - 1),)


_FORMULAS: dict[str, Any] = {
    "lora": _lora,
    "dora": _dora,
    "embedding lora": _embedding,
    "embedding dora": _dora,
    "expert lora": _experts,
    "adalora": _adalora,
    "ia3": _ia3,
    "loha": _loha,
    "lokr": _lokr,
}


def _rows(plan: ParameterPlan, rows: Tensor, stored: Tensor) -> Change:
    """Change of the named rows alone: a selection matrix times their differences."""
    at = torch.tensor(plan.tokens)
    old = stored[at]
    difference = torch.where(rows == old.to(rows.dtype), 0.0, rows.double() - old.double())
    selection = torch.zeros(stored.shape[0], len(at), dtype=torch.float64)
    selection[at, torch.arange(len(at))] = 1.0
    return Change(plan, (LowRank(selection, difference),))


def common_rows(value: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a vocabulary that both have, where one was resized; a scalar counts as one row."""
    if not value.ndim:
        return value[None], stored[None]
    rows = min(len(value), len(stored))
    return value[:rows], stored[:rows]


def replaced(plan: ParameterPlan, value: Tensor, stored: Tensor) -> Change:
    """Difference of a replaced parameter from the base's value, cast to the dtype of the new one: a copy in a coarser
    dtype is no change."""
    new, old = common_rows(value, stored)
    cast = old.to(new.dtype)
    difference = torch.where(new == cast, 0.0, new.double() - old.double())
    added = len(value) - len(stored) if value.ndim else 0
    coarser = new.dtype != old.dtype and not torch.equal(cast.to(old.dtype), old)
    rounded = str(new.dtype).removeprefix("torch.") if coarser else ""
    return Change(plan, _matrices(difference), added_rows=added, rounded=rounded)


def _matrices(difference: Tensor) -> tuple[Tensor, ...]:
    """A difference as matrices: one for each expert of a stack (E, ., .); of a convolution one, with a row a kernel."""
    if difference.ndim == 3:
        return tuple(difference)
    return (difference.flatten(1) if difference.ndim > 3 else difference,)
