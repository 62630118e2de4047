"""`duat support`: how far duat understands a model, found by running it, not from a list."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.decomposition import Decomposition, crossing
from duat_cli.analysis.own_fault import own_fault, require_repeatable, require_signal
from duat_cli.analysis.prepared import prepared_inputs, require_readable
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.stacks import chosen_stack, parts_of, reads
from duat_cli.compat.libc import give_back_free_memory
from duat_cli.errors import DuatError, InputError, UnsupportedModelError
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.quiet import described
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.chains import ByNameError
from duat_cli.models.discovery.modality import SEED, STATES, decoder_of, input_name, is_pair, probe_inputs, stack_of
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.discovery.unread import ENCODER_ALONE
from duat_cli.models.foreign import model_code
from duat_cli.models.instrument.calls import taken_by
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.alone import require_alone
from duat_cli.models.sweep.lockstep import one_by_one
from duat_cli.models.value_path.factors import MERGES, NO_MIXING
from duat_cli.results.base import Run
from duat_cli.results.support import StackEntry, Status, SupportEntry, SupportReport
from duat_cli.zoo import tiny
from duat_cli.zoo.inputs import made_inputs, modality_of, modality_of_type

CHECKED_TOKENS = 17
NOT_TRIED = "not tried"
"""Beginning of the reason for a type of which no tiny model, or no input for one, could be made."""


def support_of(loaded: LoadedModel) -> SupportEntry:
    """The entry of one loaded checkpoint; one that reads images or sound is run on random input.

    Raises InputError where no input can be made up, or where the model cannot read it: nothing is known of it then.
    """
    model = loaded.model
    if input_name(model) == "input_ids":
        return _blamed(loaded, with_stacks(examine(model), model))
    try:
        [made] = prepared_inputs(model, loaded.files.path, InputFiles(), trust_remote_code=False)
        require_readable(loaded, made)
    except InputError as fault:
        raise InputError(f"could not tell: {fault}; 'duat verify' takes --inputs") from fault
    try:
        return with_stacks(examine(model, like=made.tensors), model)
    except (RuntimeError, ValueError, TypeError, LookupError) as fault:
        own = own_fault(replace(loaded, like=made.tensors))
        if own is None:
            raise
        raise own from fault


def _blamed(loaded: LoadedModel, entry: SupportEntry) -> SupportEntry:
    """The entry; if the checkpoint is refused and has weights that are NaN or infinite, its reason names them."""
    broken = next(iter(loaded.nonfinite_weights), None)
    if entry.status != "refused" or broken is None:
        return entry
    return entry.model_copy(update={"reason": f"{broken} holds values that are NaN or infinite; {entry.reason}"})


def support_report(entries: list[SupportEntry], run: Run) -> SupportReport:
    """The report of these entries."""
    return SupportReport(duat_version=__version__, transformers=transformers.__version__, entries=entries, run=run)


def support_all(progress: Progress) -> list[SupportEntry]:
    """One entry for every model type of the installed transformers, each by a tiny random model."""
    types = [*tiny.text_model_types(), *tiny.other_model_types()]
    found = []
    for number, model_type in enumerate(types):
        progress(number, len(types), model_type)
        found.append(entry_of_type(model_type))
        give_back_free_memory()  # reference cycles of hundreds of models take gigabytes
    return found


def entry_of_type(model_type: str) -> SupportEntry:
    """The entry of one type, from a tiny random model on made-up input."""
    built = tiny.build(model_type) if model_type in tiny.text_model_types() else _built(model_type)
    if isinstance(built, tiny.NotBuilt):
        reason = built.reason if built.made else f"{NOT_TRIED}: {tiny.default_fault(model_type) or built.reason}"
        entry = _refused(model_type, reason)
        return entry.model_copy(update={"modality": modality_of_type(model_type)})
    like = None if input_name(built.model) == "input_ids" else built.inputs
    try:
        return with_stacks(examine(built.model, model_type, like), built.model)
    except Exception as fault:  # the model's own code fails, which says nothing about the form
        entry = _refused(model_type, f"{type(built.model).__name__}: {described(fault)}")
        return entry.model_copy(update={"modality": modality_of(type(built.model))})


def _built(model_type: str) -> tiny.TinyModel | tiny.NotBuilt:
    """A tiny model of a type that may read pictures or sound."""
    faults = []
    for how in tiny.ways():
        try:
            model = tiny.tiny_model(model_type, how=how)
            name = input_name(model)
            if name == "input_ids" and name not in taken_by(stack_of(model).forward):
                return tiny.NotBuilt(model_type, f"{type(model).__name__} has no forward pass of its own")
            inputs = {} if name == "input_ids" else made_inputs(model, stack_of(model), name)
            return tiny.TinyModel(model_type, model, inputs)
        except Exception as fault:
            faults.append(tiny.one_line(fault))
    return tiny.NotBuilt(model_type, faults[0])


def with_stacks(entry: SupportEntry, model: Any) -> SupportEntry:
    """The entry with the model's modality and the parts that --stack can name."""
    found: dict[str, Any] = {"modality": modality_of(type(model))}
    parts = [] if is_pair(model) else parts_of(model)
    if len(reads(model)) > 1:
        found["stacks"] = [_stack(stack, _of_part(chosen_stack(model, stack), entry.model_type)) for stack in parts]
        if entry.status == "refused" and any(one.status != "refused" for one in found["stacks"]):
            why = f"as a whole, on one kind of input: {entry.reason}"
            found |= {"status": "partly", "parts": [why], "reason": None}
    return entry.model_copy(update=found)


def _of_part(part: Any, model_type: str) -> SupportEntry:
    name = input_name(part)
    try:
        like = None if name == "input_ids" else made_inputs(part, stack_of(part), name)
    except tiny.TinyError as fault:
        return _refused(model_type, f"{NOT_TRIED}: {fault}")
    return _examine_stack(part, model_type, like)


def _stack(stack: str, entry: SupportEntry) -> StackEntry:
    reason = "; ".join(part for part in entry.parts if not part.startswith(ENCODER_ALONE)) or entry.reason
    return StackEntry(stack=stack, status="exact" if reason is None else entry.status, reason=reason)


def examine(model: Any, model_type: str | None = None, like: Mapping[str, Tensor] | None = None) -> SupportEntry:
    """Discovers the structure, then rebuilds the outputs for a random input other than discovery's; both stacks of an
    encoder-decoder. like: prepared inputs of a model that reads no token ids."""
    model_type = model_type or model.config.model_type
    entry = _examine_stack(model, model_type, like)
    if entry.status == "refused" or not is_pair(model):
        return entry
    try:
        decoder = decoder_of(model)
        with model_code(type(model).__name__):
            encoder = stack_of(model)
            states = run_stack(encoder, probe_inputs(encoder, like, CHECKED_TOKENS))[0].detach()
        other = _examine_stack(decoder, model_type, {"input_ids": torch.zeros(1, 1, dtype=torch.long), STATES: states})
    except DuatError as fault:
        other = _refused(model_type, str(fault))
    return _of_both(entry, other)


def _of_both(encoder: SupportEntry, decoder: SupportEntry) -> SupportEntry:
    """One entry for an encoder-decoder, whose encoder is understood."""
    parts = [part for part in encoder.parts if not part.startswith(ENCODER_ALONE)]
    parts += [f"decoder: {part}" for part in (decoder.parts if decoder.reason is None else [decoder.reason])]
    errors = [entry.relative_error for entry in (encoder, decoder) if entry.relative_error is not None]
    paths = {entry.path for entry in (encoder, decoder)}
    return encoder.model_copy(
        update={
            "status": "partly" if parts else "exact",
            "parts": parts,
            "stacks": [_stack("encoder", encoder), _stack("decoder", decoder)],
            "relative_error": max(errors),
            "path": "softmax interception" if "softmax interception" in paths else encoder.path,
        }
    )


def _of_chains(model: Any, model_type: str, like: Mapping[str, Tensor] | None, names: Sequence[str]) -> SupportEntry:
    """One entry for a model that runs several chains of blocks, each read by itself."""
    found = {name: _examine_stack(model, model_type, like, name) for name in names}
    stacks = [_stack(name, entry) for name, entry in found.items()]
    parts = [f"stack {one.stack}: {one.reason}" for one in stacks if one.reason is not None]
    errors = [entry.relative_error for entry in found.values() if entry.relative_error is not None]
    if not errors:
        return _refused(model_type, "; ".join(parts)).model_copy(update={"stacks": stacks})
    path = next(entry.path for entry in found.values() if entry.relative_error is not None)
    return _entry(model_type, path, parts, max(errors)).model_copy(update={"stacks": stacks})


def _examine_stack(
    model: Any, model_type: str, like: Mapping[str, Tensor] | None, chain: str | None = None
) -> SupportEntry:
    try:
        structure = discover(model, like, chain=chain)
        with model_code(type(model).__name__):
            require_alone(structure, one_by_one, like)
            error, faults = _errors(structure, like)
    except ByNameError as fault:
        return _of_chains(model, model_type, like, fault.names)
    except DuatError as fault:
        return _refused(model_type, str(fault))
    if not structure.plain_error <= tolerance_for(model.dtype):
        reason = f"duat's instruments change this model: under them its output is off by {structure.plain_error:.1e}"
        try:
            require_repeatable(structure, one_by_one, like)
        except UnsupportedModelError as fault:
            reason = str(fault)
        return _refused(model_type, reason, structure)
    if not error <= tolerance_for(model.dtype):
        return _refused(model_type, f"the rebuilt output misses the model's by {error:.1e}", structure)
    return _entry(model_type, structure.path, [*structure.uncovered, *faults], error)


def _errors(structure: ModelStructure, like: Mapping[str, Tensor] | None) -> tuple[float, list[str]]:
    """The certificate's error, and notes on operators without proved factors, each reason once."""
    decomposition = Decomposition()
    errors: list[float] = []
    faults: dict[str, list[int]] = {}

    def listen(run: BlockRun) -> None:
        require_signal(run)
        step = decomposition.advance(run)
        errors.append(step.terms.error)
        try:
            crossing(run, structure.block(run.index))
        except UnsupportedModelError as fault:
            which = "cross-attention" if run.parts.second is None else "the mixer beside attention"
            faults.setdefault(f"{which}: {fault}", []).append(run.index)
        try:
            step.operator(run, structure.block(run.index))
        except UnsupportedModelError as fault:
            if not run.attention and str(fault) in (MERGES, NO_MIXING):
                return  # there is nothing to read
            faults.setdefault(str(fault), []).append(run.index)

    given = probe_inputs(structure.stack, like, CHECKED_TOKENS, seed=SEED + 1)
    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, given), listen)
    if len(errors) != len(structure.calls):
        raise UnsupportedModelError("the number of block calls depends on the input")
    worst = max(errors, key=lambda e: (math.isnan(e), e))
    return worst, [f"operator of block {', '.join(map(str, blocks))}: {why}" for why, blocks in faults.items()]


def _entry(model_type: str, path: Any, parts: list[str], error: float | None) -> SupportEntry:
    """The entry of a model that is understood but for some parts."""
    status: Status = "partly" if parts else "exact"
    return SupportEntry(model_type=model_type, status=status, path=path, parts=parts, reason=None, relative_error=error)


def _refused(model_type: str, reason: str, structure: ModelStructure | None = None) -> SupportEntry:
    entry = _entry(model_type, structure.path if structure else None, [], None)
    return entry.model_copy(update={"status": "refused", "reason": reason})
