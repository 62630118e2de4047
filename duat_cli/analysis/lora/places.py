"""The norm that stands in front of a changed parameter, seen on a run, and the most that the change can add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import random_like, same_storage, wide
from duat_cli.models.block.norms import NormForm
from duat_cli.models.discovery.structure import ModelStructure, run_stack
from duat_cli.models.edits.tuned import own_names
from duat_cli.models.instrument.hooks import hooked
from duat_cli.operators.lowrank import LowRank, Piece, spectrum

NONE_IN_FRONT = "no norm of its block stands directly in front of it"
LARGE = 1e3  # so far out that a norm's epsilon does not show


Norms = dict[str, tuple[nn.Module, NormForm]]
"""By parameter: the norm whose output its module reads."""


def norms_in_front(model: Any, structure: ModelStructure, prompt: Prompt, names: list[str]) -> Norms:
    """One plain run with eyes on the changed modules: who reads a norm's very output."""
    own = own_names(model, names)
    modules = {name: model.get_submodule(module) for name, (module, _) in own.items()}
    forms = {norm: form for block in structure.blocks for norm, form in block.parts.norms.items()}
    made: dict[nn.Module, Tensor] = {}
    read: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        several = output if isinstance(output, (tuple, list)) else (output,)
        out = next((o for o in several if isinstance(o, Tensor)), None)
        if out is not None:
            made[module] = out
        if args and isinstance(args[0], Tensor):
            read[module] = args[0]

    with torch.no_grad(), hooked({*forms, *modules.values()}, after=see):
        run_stack(structure.stack, prompt.input_ids.to(model.device))
    in_front = {}
    for name, module in modules.items():
        source = next((n for n in forms if n in made and module in read and same_storage(made[n], read[module])), None)
        if source is not None and source is not module and read[module].shape[-1] == forms[source].gain.numel():
            in_front[name] = (source, forms[source])
    return in_front


def sup_local(pieces: tuple[Piece, ...], inputs_first: bool, norm: nn.Module, form: NormForm) -> float:
    """√M σ_max(ΔW diag(γ) P) + ‖ΔW β‖: the most the change adds to the output of a layer behind this norm.

    Behind it a token is γ ∘ (P x)/rms(P x) + β, and P x / rms(P x) lies on a sphere of radius √M.
    """
    gain = true_gain(norm, form)
    bias = None if form.bias is None else form.bias.detach().reshape(-1).double().cpu()
    [piece] = pieces
    change = (
        (piece.mT if inputs_first else piece) if isinstance(piece, LowRank) else (piece.T if inputs_first else piece)
    )
    if isinstance(change, LowRank):
        right = change.right * gain
        seen: Piece = LowRank(change.left, right - right.mean(1, keepdim=True) if form.centered else right)
        shift = 0.0 if bias is None else float((change.left @ (change.right @ bias)).norm())
    else:
        dense = change * gain
        seen = dense - dense.mean(1, keepdim=True) if form.centered else dense
        shift = 0.0 if bias is None else float((change @ bias).norm())
    return len(gain) ** 0.5 * float(spectrum(seen)[0]) + shift


def true_gain(norm: nn.Module, form: NormForm) -> Tensor:
    """γ with its scale, which the form leaves open: from the norm's own answer to a large input; (M,) float64."""
    gain = form.gain.detach().reshape(-1)
    with torch.no_grad():
        x = random_like(gain.new_ones(1, 1, len(gain))) * LARGE
        y = wide(norm(x)) if form.bias is None else wide(norm(x)) - form.bias
    centered = wide(x) - wide(x).mean(dim=-1, keepdim=True) if form.centered else wide(x)
    unit = centered / centered.square().mean().sqrt()
    factor = (y * unit * gain).sum() / (unit * gain).square().sum()
    return (gain * factor).double().cpu()
