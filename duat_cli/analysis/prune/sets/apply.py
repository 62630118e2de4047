"""Writes a checkpoint without the chosen terms, reads it back and compares it with the ablation.

Whole blocks, and parts of which every block loses equally many, are really removed if the checkpoint written so gives
the output of the ablated model; everything else is zeroed in the weights. The comparison decides, not a table of
architectures: if a config cannot represent a removal, the output differs or the checkpoint cannot be read; the terms
are then zeroed, and a note says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.sets.cut import Cut, cuts_of
from duat_cli.compat.safetensors import system_error
from duat_cli.compat.transformers import encoder_output
from duat_cli.errors import DuatError, InputError, UnsupportedModelError
from duat_cli.loading.checkpoint.dtypes import STORED_FLOATS
from duat_cli.loading.checkpoint.files import plain_mode, read_json
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.stored import STORED, most_stored
from duat_cli.loading.declared.embedder import modules
from duat_cli.loading.declared.fields import GENERATION
from duat_cli.loading.inputs.within import pieces_of
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.quiet import described, hushed
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.discovery.causality import probe_output
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, STATES, is_pair, part_reading, probe_inputs
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.cutting import without_parts
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.edits.surgery import without_blocks, zeroed
from duat_cli.models.sweep.passes import record, removals
from duat_cli.models.sweep.rows import run_without
from duat_cli.models.terms.sites import Sites, TermId
from duat_cli.text import clean, listed, one_line, plural

WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz",
    ".ot", ".tflite", ".mlmodel", ".pkl",
}  # fmt: skip


TEXTS_ALONE = (
    "the written checkpoint was compared on texts alone: a model that adds features of a picture behind some block may "
    "give another output for pictures; --image or --inputs compares with one"
)

Like: TypeAlias = Mapping[str, Tensor] | None
"""Model inputs to imitate, as for `probe_inputs`."""


@dataclass(frozen=True)
class Applied:
    """The checkpoint that was written."""

    removed_blocks: tuple[int, ...]
    removed_neurons: int
    """How many neurons every FFN lost."""
    removed_groups: int
    """Key and value heads that every attention lost, with the heads that use them."""
    zeroed: int
    """How many terms are still there, as zeros."""
    notes: tuple[str, ...]
    """Why something was zeroed instead of removed, and which tensors were not carried over; one line each."""
    error: float
    """Relative distance of the written checkpoint's output from the ablated model's."""
    dtype: str
    """Dtype of the written weights."""
    bytes_before: int
    """Size of the tensors that the model has, in the files of the checkpoint that was loaded."""
    bytes_after: int
    """Size of the tensors in the written files."""


def check_directory(directory: Path) -> None:
    """Raises InputError, before anything is computed, where `directory` cannot be written as a whole."""
    where = f"--apply '{clean(str(directory))}'"
    if directory.is_dir() and any(directory.iterdir()):
        raise InputError(f"{where}: the folder is not empty; name a new one")
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{where}: is a file, expected a new folder")
    if not directory.absolute().parent.is_dir():
        raise InputError(f"{where}: there is no folder '{clean(str(directory.absolute().parent))}'; create it first")
    _part_folder(directory).rmdir()  # a fault of writing there is better told now than behind all the computing


def apply_terms(
    loaded: LoadedModel,
    structure: ModelStructure,
    sites: Sites,
    parameters: Mapping[nn.Module, BlockParameters],
    terms: Sequence[TermId],
    directory: Path,
) -> Applied:
    """Write the model without `terms` to `directory`, whole or not at all. parameters: of every block.

    The model in memory is left unchanged. Raises InputError where `directory` cannot be written, and
    UnsupportedModelError if no way to write the set gives the ablated model's output.
    """
    check_directory(directory)
    if not terms:
        raise InputError("--apply: the chosen set is empty; there is nothing to remove")
    model, files, unused = loaded.headed, loaded.files, loaded.unexpected
    expected = _ablated(model, structure, sites, terms, loaded.like)
    notes: list[str] = []
    if unused:
        many = plural(len(unused), "tensor")
        notes.append(f"{many} not carried over, unused by {type(model).__name__}: {listed(list(unused))}")
    left = sum(files.tensors[name].bytes for name in unused if name in files.tensors)
    failed: list[tuple[Cut, DuatError]] = []
    for plan in cuts_of(structure, parameters, terms):
        part = _part_folder(directory)
        try:
            dtype = _written(model, structure, sites, plan, part, files)
            error, size = _read_back(part, model, expected, loaded.like)
            if not error <= tolerance_for(model.dtype):
                raise UnsupportedModelError(f"it then gives another output than the ablation (relative {error:.1e})")
            _open_to_all(part)
            if directory.is_dir():  # empty; Windows puts nothing in a folder's place
                directory.rmdir()
            os.replace(part, directory)
        except DuatError as fault:
            failed.append((plan, fault))
            continue
        except OSError as fault:
            raise _unwritable(directory, fault) from fault
        finally:
            shutil.rmtree(part, ignore_errors=True)
        if plan.blocks and loaded.like is None and pieces_of(model.config):
            notes.append(TEXTS_ALONE)
        return Applied(
            removed_blocks=plan.blocks,
            removed_neurons=plan.width,
            removed_groups=plan.groups,
            zeroed=len(plan.zeroed),
            notes=(*notes, *plan.notes, *_reasons(failed, plan)),
            error=error,
            dtype=str(dtype).removeprefix("torch."),
            bytes_before=files.total_bytes - left,
            bytes_after=size,
        )
    raise UnsupportedModelError(f"the set could not be written: {'; '.join(_reasons(failed, Cut()))}")


def _reasons(failed: Sequence[tuple[Cut, DuatError]], written: Cut) -> list[str]:
    """Why removals that were tried have failed, each reason once. written: the way that succeeded."""
    found = []
    for plan, fault in failed:
        what = [plural(len(plan.blocks), "block")] if plan.blocks and not written.blocks else []
        what += [f"{plural(plan.width, 'neuron')} a block"] if plan.neurons and not written.neurons else []
        if plan.heads and not written.heads:
            what.append(f"{plural(plan.groups, 'key and value head')} a block")
        reason = one_line(str(fault), 300)
        found.append(f"{' and '.join(what)} not removed but zeroed: {reason}" if what else f"zeroed: {reason}")
    return list(dict.fromkeys(found))


# -- writing and reading back --------------------------------------------------------------------------------


def _written(
    model: Any, structure: ModelStructure, sites: Sites, plan: Cut, part: Path, files: CheckpointFiles
) -> torch.dtype:
    with _edited(model, structure, sites, plan), hushed():
        state, dtype = _state(model, files)
        try:
            model.save_pretrained(part, **({} if state is None else {"state_dict": state}))
        except OSError:
            raise
        except Exception as fault:
            if (error := system_error(fault)) is not None:
                raise error from fault
            # foreign code may raise anything on a model that it was not written for
            raise UnsupportedModelError(f"transformers cannot save it: {one_line(str(fault), 200)}") from fault
    _state_dtype(part / "config.json", dtype)
    _copy_beside(files.path, part)
    return dtype


def _copy_beside(source: Path, part: Path) -> None:
    """Copies every other file of the checkpoint: tokenizer, pooling, licence and card. No weights of any format are
    copied but those of modules behind the model, as sentence embedders have them."""
    behind = [source / one.path for one in modules(source) or () if one.path != "."]
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        own = any(file.is_relative_to(folder) for folder in behind)
        folders = [source / parent for parent in name.parents if parent != Path()]
        foreign = not own and (
            _is_weights(file) or any(_is_weights(other) for folder in folders for other in folder.iterdir())
        )
        if not file.is_file() or foreign or any(p.startswith(".") for p in name.parts):
            continue
        # transformers writes the generation settings of config.json, without those of the checkpoint's own file
        if name == Path(GENERATION) or not (part / name).exists():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, part / name)


def _is_weights(file: Path) -> bool:
    return file.suffix in WEIGHTS or file.name.endswith(".index.json")


@contextlib.contextmanager
def _edited(model: Any, structure: ModelStructure, sites: Sites, plan: Cut) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(zeroed(model, structure, sites, plan.zeroed))
        if plan.blocks:  # before the parts: the width of the FFNs is that of the blocks that stay
            stack.enter_context(without_blocks(model, structure, plan.blocks))
        for cut in (plan.neurons, plan.heads):
            if cut:
                stack.enter_context(without_parts(model, cut))
        yield


def _state(model: Any, files: CheckpointFiles) -> tuple[dict[str, Tensor] | None, torch.dtype]:
    """The weights in the checkpoint's dtypes, or None, to save them as they are, where they have these dtypes already
    or the conversion would lose something; and the dtype of most."""
    dtype = most_stored(files) or model.dtype
    if {dtype, *(STORED[one.dtype] for one in files.tensors.values() if one.dtype in STORED_FLOATS)} == {model.dtype}:
        return None, dtype
    state: dict[str, Tensor] = {}
    # One converted tensor per tensor in memory: save_pretrained writes tied weights once, which it knows by address.
    converted: dict[tuple[object, ...], Tensor] = {}
    for name, value in model.state_dict().items():
        # Views with one address are the same tensor only if shape, stride and dtype agree; empty ones share address 0.
        place = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        known = converted.get(place) if value.numel() else None
        stored = dtype if name not in files.tensors else STORED[files.tensors[name].dtype]
        state[name] = (value.to(stored) if value.is_floating_point() else value) if known is None else known
        converted[place] = state[name]
        if known is None and not torch.equal(state[name].to(value.dtype), value):
            return None, model.dtype
    return state, dtype


def _state_dtype(config: Path, dtype: torch.dtype) -> None:
    values = read_json(config)
    values["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _ablated(model: Any, structure: ModelStructure, sites: Sites, terms: Sequence[TermId], like: Like = None) -> Tensor:
    """The output of the model with the terms removed by hooks, its weights untouched."""
    forward = functools.partial(probe_output, model, like)
    return run_without(structure, forward, record(structure, forward), removals(structure, sites, terms))


def _read_back(part: Path, model: Any, expected: Tensor, like: Like) -> tuple[float, int]:
    """Relative error of the written checkpoint's output, once read back; and the bytes of its tensors."""
    again = load(str(part), dtype=str(model.dtype).removeprefix("torch."), device=str(model.device))
    error = relative_error(probe_output(again.model, like), expected)
    fault = _fault_as_called(again.model, like)
    if fault is not None and _fault_as_called(model, like) is None:
        raise UnsupportedModelError(f"it then runs with use_cache=False alone ({described(fault)})")
    return error, again.files.total_bytes


@torch.no_grad()
def _fault_as_called(model: Any, like: Like) -> Exception | None:
    """The exception that the model raises when called as users do: with a cache and one token more; None where it runs.
    A hybrid without attention may not know the length of its cache, and a decoder's cache may be made with the number
    of the encoder's blocks."""
    ids = probe_inputs(part_reading(model, like), like, DISCOVERY_TOKENS)
    writes = is_pair(model) and model.can_generate()
    generate = functools.partial(model.generate, max_new_tokens=2, do_sample=False) if writes else None
    try:
        with hushed():
            if not isinstance(ids, Tensor) and STATES in ids:  # for a decoder
                states = encoder_output(ids[STATES])
                (generate or model)(encoder_outputs=states, decoder_input_ids=ids["input_ids"])
                return None
            if not isinstance(ids, Tensor):  # pictures or sound
                (generate or model)(**ids)
                return None
            if generate is not None:
                generate(input_ids=ids, decoder_start_token_id=int(ids[0, 0]))
                return None
            name = "decoder_input_ids" if is_pair(model) else "input_ids"
            given = {"input_ids": ids, name: ids}
            kept = getattr(model(**given), "past_key_values", None)
            if kept is not None:
                model(**given | {name: ids[:, -1:]}, past_key_values=kept)
    except Exception as fault:  # of code that is not duat's
        return fault
    return None


def _part_folder(directory: Path) -> Path:
    """A folder beside the final one: a rename is atomic only within a file system."""
    try:
        return Path(tempfile.mkdtemp(dir=directory.absolute().parent, prefix=".duat-"))
    except OSError as fault:
        raise _unwritable(directory, fault) from fault


def _unwritable(directory: Path, fault: OSError) -> InputError:
    return InputError(f"--apply '{clean(str(directory))}': cannot write: {fault.strerror or fault}")


def _open_to_all(folder: Path) -> None:
    folder.chmod(plain_mode(folder=True))
    for file in folder.rglob("*"):
        file.chmod(plain_mode(folder=file.is_dir()))
