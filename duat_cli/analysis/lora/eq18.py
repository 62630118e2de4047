"""Test of Eq. 17 and 18 on the tuned run: each linear layer of an FFN gives W_base x + dW x, dW taken from elsewhere.

Eq. 17 is h = W_0 x + dW x. Eq. 18 puts it into the FFNs of Eq. 11: W'_{j,2} + dW_{j,2} in front of the nonlinearity,
W'_{j,3} + dW_{j,3} behind it (as printed, it has a plus in front of sigma, where Eq. 11 has the product, and dW of
layer j + 1). There W' are products of layers applied to x_0; here each layer is tested on its own input. dW comes from
the adapter's factors or from the difference of the files, W_base from the base model. x and the output that the sum has
to equal come from a plain run of the tuned model. Eq. 18 does not cover attention: dW_q and dW_k act through H, dW_v
and dW_o through A.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from duat_cli.analysis.lora.ground import Ground, Side
from duat_cli.analysis.session import Session
from duat_cli.errors import UnsupportedModelError, or_reason
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.block.linears import applied_axis
from duat_cli.models.discovery.modality import placed
from duat_cli.models.discovery.structure import ModelStructure, run_stack
from duat_cli.models.edits.tuned import joined_places, own_names
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.sweep.lockstep import Pass, Visit, Watched, in_step, one_by_one
from duat_cli.operators.lowrank import LowRank, Piece
from duat_cli.results.base import Skipped
from duat_cli.results.lora import Eq18

STATEMENT = "Eq. 18, W'_tuned = W'_base + dW in the FFN's linear layers"
CHANGE_TOLERANCE = 1e-3  # as a share of |dW x|; a scale that is wrong by 1 % exceeds it tenfold
INPUTS = 64  # at most so many input vectors for each layer, and so many prompts that they are taken from
_ROUNDINGS = 3  # rounding is taken to explain an error of up to this multiple of its standard size

Stated = Callable[[str], Piece | None]
"""Gives a parameter's dW in the base's layout, from the adapter or the files; None where they do not change it."""


@dataclass(frozen=True)
class _Layer:
    """Errors of one linear layer on the tuned run."""

    relative_error: float  # |y - (W_base x + dW x + b)| / |y|, y as the tuned model made it
    change_error: float  # |(W_tuned - W_base - dW) x| / |dW x|, float64
    rounding: float  # the part of change_error that rounding of W_tuned to its dtype may make

    def holds(self, tolerance: float) -> bool | None:
        """Whether the layer passes; None where dW x is too small beside the rounding of W_tuned to tell."""
        if not self.relative_error <= tolerance:  # so that NaN fails
            return False
        if CHANGE_TOLERANCE < self.change_error <= _ROUNDINGS * self.rounding:
            return None
        return self.change_error <= CHANGE_TOLERANCE


class Eq18Test:
    """Test of every FFN layer whose weights differ, or for which a change is stated, on the first INPUTS prompts.

    Its passes go through the tuned model. Behind them in each block, its layers are tested while the block's weights
    are in memory, and the base's too, provided that the base is read one block ahead: `alone` sees to that.
    """

    def __init__(
        self, base: Ground, tuned: Session, prompts: Sequence[Prompt], changed: Sequence[str], stated: Stated
    ) -> None:
        """base: found with `layers`. changed: the parameters in the report."""
        self._ground, self._base, self._tuned, self._stated = base, base.session, tuned, stated
        self._model = model = self._base.loaded.named
        self._calls = self._base.structure.calls  # as of now; a later sweep finds them anew, behind the tuned model's
        self._joined = joined_places(model, list(changed))
        self._places = own_names(model, [name for name in changed if name not in self._joined])
        self._reasons = dict(base.reasons)
        self._sides: dict[str, Side] = {name: side for one in base.layers.values() for name, side in one.items()}
        model, stack, device = tuned.loaded.named, tuned.structure.stack, tuned.loaded.device
        layers = ((name, _tuned_module(model, name)) for name in self._sides)
        self._layers = {name: module for name, module in layers if module is not None}
        first = prompts[:INPUTS]
        self._each = max(1, INPUTS // len(first))
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._found: dict[str, _Layer | None] = {}
        given = [placed(one.given, device, model.dtype) for one in first]
        self._runs = [Watched(functools.partial(run_stack, stack, one)) for one in given]
        self.passes: list[Pass] = [*self._runs, Visit(tuned.structure.calls, self._look, tuned.weights)]

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """Context that the passes run in; its hooks record what the layers read and give."""
        return hooked(set(self._layers.values()), after=self._watch)

    def alone(self) -> Eq18Test:
        """Runs the passes with nothing else beside them; returns itself."""
        before, after = self._base.weights, self._tuned.weights
        with self.attached():
            if before is None or after is None:
                one_by_one(self.passes)
                return self
            visit = Visit(self._base.structure.calls, lambda _number: None, before)
            in_step(before, lambda: self._base.together([visit]), after, lambda: self._tuned.together(self.passes))
        return self

    def found(self) -> Eq18:
        """The result, once the passes have run."""
        for name in self._layers:
            if name in self._seen and name not in self._found:
                self._test(name)
        places, tolerance = self._places | self._joined, tolerance_for(self._model.dtype)
        known = {name: layer for name in self._seen if (layer := self._found.get(name)) is not None}
        failed = [name for name, layer in known.items() if not layer.holds(tolerance)]
        # a layer that is not in the report counts only if it failed: rounding alone is no change
        listed = {module for module, _ in places.values()}
        tested = {name: layer for name, layer in known.items() if name in listed or name in failed}
        found: dict[str, list[str]] = {place: [] for place in ("second", "third", "attention", "elsewhere", "block")}
        model, structure = self._model, self._base.structure
        for name, (module, _) in places.items():
            place = self._sides[module] if module in tested else _where(model, structure, module)
            found[place].append(name)
        none = "no linear layer of an FFN changes, or none could be tested"
        return Eq18.explained(
            none,
            statement=STATEMENT,
            relative_error=max((t.relative_error for t in tested.values()), default=None),
            tolerance=tolerance,
            change_error=max((t.change_error for t in tested.values()), default=None),
            change_tolerance=CHANGE_TOLERANCE,
            holds=not failed if tested else None,
            inputs=max((sum(len(x) for x, _ in self._seen[name]) for name in tested), default=0),
            failed=failed,
            on_second=found["second"],
            on_third=found["third"],
            through_attention=found["attention"],
            elsewhere=found["elsewhere"],
            not_covered=[
                Skipped(what=name, why=_why(model, places[name][0], self._reasons)) for name in found["block"]
            ],
        )

    def _watch(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """Keeps inputs (n, in) and outputs (n, out) of the tuned model's layers, at tokens spread evenly over a
        prompt."""
        if not any(run.on for run in self._runs):
            return
        x, y = (value.reshape(-1, value.shape[-1]) for value in (args[0], output))
        at = torch.linspace(0, len(x) - 1, min(self._each, len(x)), device=x.device).round().long()
        for name in (n for n, layer in self._layers.items() if layer is module):
            self._seen.setdefault(name, []).append((x[at].cpu(), y[at].cpu()))

    def _look(self, number: int) -> None:
        calls = self._calls
        if calls[number] in calls[number + 1 :]:
            return
        for name in self._ground.layers[calls[number]]:
            layers = self._model.get_submodule(name), self._layers.get(name)
            there = not any(p.is_meta for one in layers if one is not None for p in one.parameters())
            if name in self._seen and there:  # else its weights are loaded in the end, by `found`
                self._test(name)

    def _test(self, name: str) -> None:
        """Tests one layer. Where the test tells nothing, `_reasons` holds why."""
        pairs, self._found[name] = self._seen[name], None
        seen = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        try:
            found = self._compared(name, seen)
        except UnsupportedModelError as reason:
            self._reasons[name] = str(reason)
            return
        if found is not None and found.holds(tolerance_for(self._model.dtype)) is None:
            share, dtype = f"{found.rounding:.1%}", self._tuned.loaded.dtype
            self._reasons[name] = f"rounding to {dtype} makes about {share} of dW x there; a wider --dtype tells"
            return
        self._found[name] = found

    def _compared(self, name: str, seen: tuple[Tensor, Tensor]) -> _Layer | None:
        """Errors of one layer; None where nothing changes. UnsupportedModelError says why it cannot be tested."""
        old, new = self._model.get_submodule(name), self._layers[name]
        self._base.loaded.bring(old)
        self._tuned.loaded.bring(new)
        parameters = {leaf: parameter for parameter, (module, leaf) in self._places.items() if module == name}
        leaves = [
            leaf for leaf in ("weight", "bias") if any(getattr(layer, leaf, None) is not None for layer in (old, new))
        ]
        changes = {leaf: self._stated(parameters.get(leaf, f"{name}.{leaf}")) for leaf in leaves}
        if all(change is None for change in changes.values()) and _same(old, new):
            return None
        axis = applied_axis(old)
        if applied_axis(new) != axis:
            raise UnsupportedModelError("the tuned model stores this layer turned")
        x, y = (value.double() for value in seen)
        moved = _product(x, changes["weight"], axis, y.shape[-1])
        if (bias := changes.get("bias")) is not None:
            assert isinstance(bias, Tensor)
            moved = moved + bias
        before, after = (_affine(x, layer, axis) for layer in (old, new))
        size = float(moved.norm()) or float((after - before).norm())  # an unstated change counts as error 1
        return _Layer(
            relative_error=relative_error(before + moved, y),
            change_error=float((after - before - moved).norm()) / size if size else 0.0,
            rounding=_rounding(x, new, axis) / size if size else 0.0,
        )


# -- where -----------------------------------------------------------------------------------------------------


def _where(model: nn.Module, structure: ModelStructure, module: str) -> Literal["attention", "block", "elsewhere"]:
    held = model.get_submodule(module)
    for block in structure.blocks:
        parts = block.parts
        sources = {p.linear for p in (parts.value_projection, parts.output_projection) if p is not None}
        inside = (m for attention in parts.attention for m in parts.modules_of(attention))
        if held in sources or parts.in_cross(held) or held in inside:
            return "attention"
        if held in set(parts.module.modules()):
            return "block"
    return "elsewhere"


def _why(model: nn.Module, module: str, reasons: Mapping[str, str]) -> str:
    """Why a module is not covered: the reason of the layer itself, or of the unit or block that it is in; for a norm or
    the like, that it is no layer."""
    around = [name for name in reasons if module == name or module.startswith(f"{name}.")]
    matrix = any(p.ndim > 1 for p in model.get_submodule(module).parameters())
    return reasons[max(around, key=len)] if matrix and around else "it is no linear layer of the block's FFN"


# -- the layers on the tuned run -------------------------------------------------------------------------------


def _tuned_module(model: Any, name: str) -> nn.Module | None:
    """The tuned model's layer of that name, with or without the base model's prefix; None if there is none."""
    found = or_reason(lambda: own_names(model, [f"{name}.weight"]))
    return None if isinstance(found, str) else model.get_submodule(found[f"{name}.weight"][0])


def _same(old: Any, new: Any) -> bool:
    pairs = [(getattr(old, leaf, None), getattr(new, leaf, None)) for leaf in ("weight", "bias")]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _product(x: Tensor, change: Piece | None, axis: int, width: int) -> Tensor:
    """dW x for x (n, in) and dW in the layer's layout, as (n, out). axis: the axis of dW that the inputs are on."""
    if change is None:
        return x.new_zeros(len(x), width)
    turned = change.mT if axis == 1 else change  # (in, out)
    return x @ turned.left @ turned.right if isinstance(turned, LowRank) else x @ turned


def _affine(x: Tensor, layer: Any, axis: int) -> Tensor:
    weight = layer.weight.detach().cpu().double()
    y = x @ (weight.mT if axis == 1 else weight)
    bias = getattr(layer, "bias", None)
    return y if bias is None else y + bias.detach().cpu().double()


def _rounding(x: Tensor, layer: Any, axis: int) -> float:
    """Standard size of what rounding the weight to its dtype adds to x W, if the errors are independent and each is at
    most eps/2 |w|."""
    weight = layer.weight.detach().cpu().double()
    squares = x.square() @ (weight.mT if axis == 1 else weight).square()
    return 0.5 * torch.finfo(layer.weight.dtype).eps * float(squares.sum().sqrt())
