"""Checks of loaded weights: whether they are those of the file, and whether they are finite."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from duat_cli.compat.transformers import targets_of
from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.orientation import rows_are_outputs, turned
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.reader import Reader
from duat_cli.loading.checkpoint.stored import STORED
from duat_cli.text import clean, shown

_COMPARED_TENSORS = 8
_COMPARED_ELEMENTS = 1 << 16
_RANDOM = 0.5  # share of differing values above which a tensor was not loaded at all


def compare_with_files(model: PreTrainedModel, files: CheckpointFiles) -> list[str]:
    """Compares some tensors, spread over the model, with the file; returns notes on those that differ in places.

    A release of transformers (5.12) has reported a clean load of random weights, which is an error here. Some classes
    set the padding row of an embedding to zero, which is a note. Tensors that are fused or renamed at load have no
    equal in the file and are left out.
    """
    notes = []
    pairs = _pairs(model, files)
    refuse_integers(model, files)
    step = -(-len(pairs) // _COMPARED_TENSORS) or 1
    chosen = sorted(pairs)[::step]
    reader = Reader(files)
    for name in chosen:
        entry, loaded = pairs[name]
        share = _changed(reader, name, loaded)
        if 0 < share <= _RANDOM:
            notes.append(f"{shown(name)}: {share:.2%} of its values are not those of the file")
        if share > _RANDOM:
            raise CheckpointError(
                f"{clean(str(files.path / entry.shard))}: {shown(name)} was not loaded as stored by "
                f"transformers {transformers.__version__}; use another release"
            )
    return notes


def _pairs(model: PreTrainedModel, files: CheckpointFiles) -> dict[str, tuple[TensorEntry, Tensor]]:
    """File tensors that the model has under the same name, with or without the base model's prefix."""
    state = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    pairs = {}
    for name, entry in files.tensors.items():
        names = (name, prefix + name, name.removeprefix(prefix))
        loaded = next((state[n] for n in names if n in state), None)
        if loaded is not None and tuple(loaded.shape) == entry.shape and entry.elements:
            pairs[name] = (entry, loaded)
    return pairs


def refuse_integers(model: PreTrainedModel, files: CheckpointFiles) -> None:
    """Refuses integers in the place of weights: they are quantised, even where config.json does not say so."""
    for name, (entry, loaded) in _pairs(model, files).items():
        if loaded.is_floating_point() and not STORED[entry.dtype].is_floating_point:
            raise CheckpointError(
                f"{clean(str(files.path / entry.shard))}: {shown(name)} is stored as {entry.dtype}: "
                "quantised weights are not supported; give the checkpoint in full precision"
            )


def refuse_turned(model: PreTrainedModel, files: CheckpointFiles) -> None:
    """Refuses weights that a format may have stored transposed. Formats that store a row for each output also do so for
    layers that keep their weight as (in, out), such as GPT-2's; the shape of a square weight does not show it."""
    for name, (target, _) in targets_of(model, rows_are_outputs(files.tensors)).items():
        module, _, own = target.rpartition(".")
        layer = model.get_submodule(module)
        if _reads_rows(layer, own):
            turned(files.path, name, files.tensors[name], f"its layer ({type(layer).__name__}) keeps it")


def _reads_rows(layer: nn.Module, own: str) -> bool:
    """Whether the first axis of a layer's parameter is its inputs: with one more row it then reads one more input. No
    value is needed."""
    weight = getattr(layer, own)
    if weight.ndim != 2 or isinstance(layer, nn.Embedding):  # an embedding looks rows up, whatever it is given
        return False
    rows, columns = weight.shape
    longer = torch.empty(rows + 1, columns, dtype=weight.dtype, device="meta")
    try:
        functional_call(layer, {own: longer}, torch.empty(1, rows + 1, dtype=weight.dtype, device="meta"))
    except Exception:  # each kind of layer has its own error
        return False
    return True


def _changed(reader: Reader, name: str, loaded: Tensor) -> float:
    """Share of the values that differ from the stored ones after the cast; for a long tensor, of its first rows."""
    if not loaded.shape:
        return _unequal(reader.tensor(name), loaded)
    rows = min(len(loaded), max(1, _COMPARED_ELEMENTS * len(loaded) // loaded.numel()))
    share = _unequal(reader.rows(name, range(rows)), loaded[:rows])
    if share <= _RANDOM:
        return share
    # a conversion at load may permute or transpose entries (rotary halves), which keeps the sorted values
    return _unequal(reader.tensor(name).flatten().to(loaded.dtype).sort().values, loaded.flatten().sort().values)


def _unequal(stored: Tensor, loaded: Tensor) -> float:
    here = stored.to(loaded.dtype)
    there = loaded.detach().cpu()
    return 1.0 - float(((here == there) | (here.isnan() & there.isnan())).double().mean())


class Sight:
    """The finite and zero check of one parameter, whose values come in pieces."""

    def __init__(self, name: str, like: Tensor, scan: Scan) -> None:
        """like: a tensor of its shape and dtype; scan: what the findings are added to."""
        self._name, self._scan, self._nonfinite = name, scan, 0
        self._number = bool(like.numel()) and like.is_floating_point()
        self._zero = self._number and like.ndim > 1

    def add(self, piece: Tensor) -> None:
        if not self._number or not piece.numel():
            return
        low, high = (bound.item() for bound in torch.aminmax(piece))  # NaN if any value is
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            self._nonfinite += int((~torch.isfinite(piece)).sum())
        self._zero = self._zero and low == high == 0

    def done(self) -> None:
        if self._nonfinite:
            self._scan.nonfinite[self._name] = self._nonfinite
        elif self._zero:
            self._scan.zero.append(self._name)


@dataclass
class Scan:
    """Findings in the values of the parameters seen so far."""

    nonfinite: dict[str, int] = field(default_factory=dict)
    """Parameter -> how many of its values are NaN or infinite."""
    zero: list[str] = field(default_factory=list)
    """Matrices that are all zero."""

    def see(self, name: str, parameter: Tensor) -> None:
        sight = Sight(name, parameter, self)
        sight.add(parameter.detach())
        sight.done()
