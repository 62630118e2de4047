"""The norm directly in front of a changed parameter, found on a run, and the most that the change can add."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.analysis.session import Session
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import random_like, same_storage, wide
from duat_cli.models.block.norms import NormForm
from duat_cli.models.discovery.modality import placed
from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.edits.tuned import own_names
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.sweep.lockstep import Pass, Visit, Watched
from duat_cli.operators.lowrank import LowRank, Piece, spectrum

NONE_IN_FRONT = "no norm of its block stands directly in front of it"
LARGE = 1e3  # so far out that a norm's epsilon does not show


@dataclass(frozen=True)
class Front:
    """The norm whose output a module reads."""

    norm: nn.Module
    form: NormForm
    gain: Tensor  # as `true_gain` returns it


class FrontNorms:
    """A plain pass that finds which changed modules read the output tensor of a norm itself. Behind it in each block,
    the gains of the norms are read while their weights are in memory."""

    def __init__(self, session: Session, prompt: Prompt, names: Sequence[str]) -> None:
        """names: the changed parameters. Raises UnsupportedModelError where one has no place in the model."""
        model, structure, device = session.loaded.named, session.structure, session.loaded.device
        own = own_names(model, list(names))
        self._modules = {name: model.get_submodule(module) for name, (module, _) in own.items()}
        holders = {module: model.get_submodule(module.rpartition(".")[0]) for module, _ in own.values()}
        self._holders = {name: holders[module] for name, (module, _) in own.items()}
        self._called = set[nn.Module]()
        self._loaded = session.loaded
        self._forms = {norm: form for block in structure.blocks for norm, form in block.parts.norms.items()}
        self._recorded = {*self._forms, *self._modules.values()}
        self._made: dict[nn.Module, Tensor] = {}
        self._read: dict[nn.Module, Tensor] = {}
        self._gains: dict[nn.Module, Tensor] = {}
        run = functools.partial(run_stack, structure.stack, placed(prompt.given, device, model.dtype))
        self._pass = Watched(run)
        self.passes: list[Pass] = [self._pass, Visit(structure.calls, self._look, session.weights)]

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """Context that the passes run in; its hooks record calls, inputs and outputs."""
        return hooked({*self._recorded, *self._holders.values()}, after=self._see)

    def _see(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._pass.on:
            return
        self._called.add(module)
        if module not in self._recorded:
            return
        several = output if isinstance(output, (tuple, list)) else (output,)
        out = next((o for o in several if isinstance(o, Tensor)), None)
        if out is not None:
            self._made[module] = out
        if args and isinstance(args[0], Tensor):
            self._read[module] = args[0]

    def _look(self, _number: int) -> None:
        for norm in self._in_front().values():
            if norm not in self._gains and not any(p.is_meta for p in norm.parameters()):
                self._gains[norm] = true_gain(norm, self._forms[norm])

    def _in_front(self) -> dict[str, nn.Module]:
        """Parameter -> the norm in front of it, as far as the pass has come."""
        made, found = self._made, {}
        for name, module in self._modules.items():
            read = self._read.get(module)
            norm = next(
                (n for n in made if n in self._forms and read is not None and same_storage(made[n], read)), None
            )
            if norm is None or norm is module or read is None:
                continue
            if read.shape[-1] == self._forms[norm].gain.numel():
                found[name] = norm
        return found

    def found(self) -> dict[str, Front]:
        """Parameter -> the norm in front of it, for those that have one, once the passes have run."""
        found = {}
        for name, norm in self._in_front().items():
            if norm not in self._gains:  # the norm of an earlier block than the module that reads it
                self._loaded.bring(norm)
                self._gains[norm] = true_gain(norm, self._forms[norm])
            found[name] = Front(norm, self._forms[norm], self._gains[norm])
        return found

    def passed_by(self) -> list[str]:
        """Parameters whose module is not called in the pass, though the one that holds it is: its code reads the
        weights itself, or not at all. Once the passes have run."""
        called = self._called
        return [name for name, one in self._modules.items() if one not in called and self._holders[name] in called]


def sup_local(pieces: tuple[Piece, ...], inputs_first: bool, gain: Tensor, form: NormForm) -> float:
    """√M σ_max(ΔW diag(γ) P) + ‖ΔW β‖: the most the change adds to the output of a layer behind this norm.

    gain: γ, as `true_gain` returns it. A token behind the norm is γ ∘ (P x)/rms(P x) + β, and P x / rms(P x) lies on a
    sphere of radius √M.
    """
    bias = None if form.bias is None else form.bias.detach().reshape(-1).double().cpu()
    [piece] = pieces
    change = piece.mT if inputs_first else piece
    if isinstance(change, LowRank):
        right = change.right * gain
        seen: Piece = LowRank(change.left, form.centre(right))
        shift = 0.0 if bias is None else float((change.left @ (change.right @ bias)).norm())
    else:
        dense = change * gain
        seen = form.centre(dense)
        shift = 0.0 if bias is None else float((change @ bias).norm())
    return len(gain) ** 0.5 * float(spectrum(seen)[0]) + shift


def true_gain(norm: nn.Module, form: NormForm) -> Tensor:
    """γ of a norm, (M,) float64. The form leaves its scale open, so the scale is taken from the norm's output for a
    large input."""
    gain = form.gain.detach().reshape(-1)
    with torch.no_grad():
        x = random_like(gain.new_ones(1, 1, len(gain))) * LARGE
        y = wide(norm(x)) if form.bias is None else wide(norm(x)) - form.bias
    centered = form.centre(wide(x))
    unit = centered / centered.square().mean().sqrt()
    factor = (y * unit * gain).sum() / (unit * gain).square().sum()
    return (gain * factor).double().cpu()
