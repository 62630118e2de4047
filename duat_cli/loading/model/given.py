"""A model that is in memory already, made ready to run without touching it.

The model that runs is a copy of its modules over the same weights: parameters share their memory with the original's,
and everything else (config, hooks, modes, buffers) is copied. The original is left as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duat_cli.compat.accelerate import without_mixed_precision
from duat_cli.compat.torch import hooked_modules, uncompile, uncompiled, without_backward_hooks
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.stored import STORED
from duat_cli.loading.checkpoint.stream import LONGEST_ROW, PIECE, Piece, Streamed
from duat_cli.loading.model.adapters import merged, rest
from duat_cli.loading.model.gpu import NO_FLOAT64, lacks_float64
from duat_cli.loading.model.load import DTYPES, LoadedModel, settle
from duat_cli.loading.model.notes import weight_notes
from duat_cli.loading.model.own_forward import settle_forwards
from duat_cli.loading.model.weights_check import Scan
from duat_cli.loading.quiet import foreign_errors, hushed
from duat_cli.text import clean, listed

_NAMES = {dtype: name for name, dtype in STORED.items()}


def given(model: Any) -> LoadedModel:
    """A transformers model, or a PEFT model of one, in the form in which `load` returns a checkpoint's.

    The active adapters of a PEFT model are merged, as PEFT does, into copies of the weights that they change. A layer
    whose adapters are disabled stays as in the base, and a tied weight is changed only where the adapter is. InputError
    or UnsupportedModelError, one line, says why a model cannot be taken.
    """
    model = uncompiled(model)
    wrapped = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    own = model.get_base_model() if wrapped else model
    if not isinstance(own, PreTrainedModel):
        raise InputError(f"a {type(model).__name__} was given: expected a transformers model, or a PEFT model of one")
    device = _device(own)
    with hushed(), torch.no_grad():
        with foreign_errors(f"{type(own).__name__}: its modules cannot be copied", UnsupportedModelError):
            shell = copy.deepcopy(model, copies := _memo(model))
        uncompile(shell)
        without_mixed_precision(shell)
        settle_forwards(shell, copies)
        rest(shell)
        backward = without_backward_hooks(shell)
        notes: list[str] = []
        if wrapped:
            shell, notes = merged(shell)
        if hooked := hooked_modules(shell):
            notes.append(
                f"forward hooks of {listed(hooked)} run on every pass: the numbers are of the model with them; what "
                "one adds between blocks stands with what an encoder adds"
            )
        if backward:
            notes.append(f"backward hooks of {listed(backward)} are left out: gradients here are of the model alone")
        with foreign_errors(f"{type(own).__name__}: cannot be run with eager attention", UnsupportedModelError):
            shell.set_attn_implementation("eager")
        settle(shell, device)
    scan = Scan()
    for name, parameter in shell.named_parameters():
        scan.see(name, parameter)
    name = clean(str(shell.config.name_or_path or type(shell).__name__))
    return LoadedModel(
        model=shell,
        name=name,
        revision=None,
        files=_described(shell, name),
        dtype=str(shell.dtype).removeprefix("torch."),
        device=str(device),
        warnings=(*notes, *weight_notes(scan.nonfinite, scan.zero, sum(p.ndim > 1 for p in shell.parameters()))),
        nonfinite_weights=scan.nonfinite,
    )


def _device(model: PreTrainedModel) -> torch.device:
    """The one device of all weights. Refuses models whose weights are on several devices, quantised, computed before
    every pass, or not in memory."""
    name = type(model).__name__
    devices = sorted({str(p.device) for p in model.parameters()})
    if "meta" in devices:
        raise UnsupportedModelError(f"{name}: some of its weights are not in memory; give the checkpoint's folder")
    if len(devices) != 1:
        raise UnsupportedModelError(f"{name}: its weights are on {listed(devices)}; move it to one device")
    for parameter, value in model.named_parameters():
        kind = type(value.data)
        if value.dtype not in DTYPES.values() or kind is not Tensor:
            raise UnsupportedModelError(
                f"{name}: {clean(parameter)} is a {kind.__name__} of {value.dtype}; duat runs plain tensors "
                "of float32, float64, bfloat16 and float16"
            )
    for place, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            raise UnsupportedModelError(f"{name}: {clean(place)} is quantised; give the model as it was before")
        for own in (own for own, value in vars(module).items() if isinstance(value, Tensor) and not value.is_leaf):
            raise UnsupportedModelError(
                f"{name}: {clean(f'{place}.{own}')} is computed before every pass; torch.nn.utils.prune.remove, "
                "remove_weight_norm or remove_spectral_norm makes it a weight of its own"
            )
    device = next(model.parameters()).device
    if lacks_float64(device):
        raise UnsupportedModelError(f"{name}: {device} {NO_FLOAT64}; give the model on the CPU: model.to('cpu')")
    return device


def _memo(model: nn.Module) -> dict[int, Any]:
    """The memo of `copy.deepcopy`: by its id, what replaces each parameter and buffer in the copy. A parameter keeps
    its memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        value = parameter.detach()
        value = value.clone() if value.is_inference() else value  # a tensor made in inference mode has no gradients
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for module in model.modules():  # LoRA's layers keep the sources of tied factors, which cannot be copied
        kept = getattr(module, "kwargs", None)
        made = kept.get("tied_adapter") if isinstance(kept, dict) else None
        memo |= {id(factor): factor.detach() for factor in (made or {}).values()}
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    return memo


def _described(model: nn.Module, name: str) -> CheckpointFiles:
    """The weights' dtypes and shapes, in the form of a checkpoint's headers."""
    tensors = {
        n: TensorEntry(tuple(p.shape), _NAMES[p.dtype], "", p.numel() * p.element_size(), 0)
        for n, p in model.named_parameters()
    }
    return CheckpointFiles(Path(name), {}, (), tensors, (), sum(t.bytes for t in tensors.values()), {}, tensors)


def streamed(model: nn.Module, entries: dict[str, TensorEntry]) -> Iterator[Streamed]:
    """Every parameter that is not empty, in pieces. entries: their shapes and dtypes, as headers would have them."""
    for name, parameter in model.named_parameters():
        if parameter.numel():
            yield Streamed(name, entries[name], _pieces(parameter.detach()))


def _pieces(value: Tensor) -> Iterator[Piece]:
    """The values in pieces: all dimensions but the last are rows, a vector is one column. float64 stays float64, all
    else becomes float32."""
    matrix = value.reshape(-1, value.shape[-1] if value.ndim > 1 else 1)
    columns = matrix.shape[1]
    long = columns > LONGEST_ROW
    height = 1 if long else max(1, PIECE // columns)
    kept = torch.float64 if value.dtype == torch.float64 else torch.float32
    for row in range(0, len(matrix), height):
        for start in range(0, columns, LONGEST_ROW):
            part = matrix[row : row + height, start : start + LONGEST_ROW]
            yield Piece(row, part.to("cpu", kept).contiguous().numpy(), not long)
