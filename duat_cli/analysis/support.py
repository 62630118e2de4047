"""`duat support`: how far duat understands a model, found by running it, not by a list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.decomposition import Decomposition, crossing
from duat_cli.analysis.prepared import prepared_inputs
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import require_signal
from duat_cli.errors import DuatError, InputError, UnsupportedModelError
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.modality import STATES, decoder_of, input_name, is_pair, stack_of
from duat_cli.models.discovery.structure import (
    ENCODER_ALONE,
    SEED,
    ModelStructure,
    discover,
    probe_inputs,
    run_stack,
)
from duat_cli.models.instrument.foreign import model_code
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.factors import NO_MIXING
from duat_cli.results.base import Run
from duat_cli.results.support import SupportEntry, SupportReport
from duat_cli.zoo import tiny

CHECKED_TOKENS = 17


def support_of(loaded: LoadedModel) -> SupportEntry:
    """The entry of one loaded checkpoint; one that reads images or sound is run on drawn input."""
    model = loaded.model
    if input_name(model) == "input_ids":
        return examine(model)
    try:
        [made] = prepared_inputs(model, loaded.files.path, InputFiles(), trust_remote_code=False)
    except InputError as fault:
        return _refused(model.config.model_type, str(fault))
    return examine(model, like=made.tensors)


def support_report(entries: list[SupportEntry], run: Run) -> SupportReport:
    """The report of these entries."""
    return SupportReport(duat_version=__version__, transformers=transformers.__version__, entries=entries, run=run)


def support_all(progress: Progress) -> list[SupportEntry]:
    """One entry for every text model type of the installed transformers, each by a tiny random model."""
    types = tiny.text_model_types()
    return list(_entries(types, progress))


def _entries(types: list[str], progress: Progress) -> Iterable[SupportEntry]:
    for number, model_type in enumerate(types):
        progress(number, len(types), model_type)
        built = tiny.build(model_type)
        if isinstance(built, tiny.NotBuilt):
            yield _refused(model_type, f"no tiny configuration can be built: {built.reason}")
        else:
            yield examine(built.model, model_type)


def examine(model: Any, model_type: str | None = None, like: Mapping[str, Tensor] | None = None) -> SupportEntry:
    """Discover the structure, then rebuild a random input other than the one discovery used; of an encoder-decoder both
    stacks. like: prepared inputs of a model that reads no token ids."""
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
    """One entry of an encoder that is understood and its decoder."""
    parts = [part for part in encoder.parts if part != ENCODER_ALONE]
    parts += [f"decoder: {part}" for part in (decoder.parts if decoder.reason is None else [decoder.reason])]
    errors = [entry.relative_error for entry in (encoder, decoder) if entry.relative_error is not None]
    paths = {entry.path for entry in (encoder, decoder)}
    return encoder.model_copy(
        update={
            "status": "partly" if parts else "exact",
            "parts": parts,
            "relative_error": max(errors),
            "path": "softmax interception" if "softmax interception" in paths else encoder.path,
        }
    )


def _examine_stack(model: Any, model_type: str, like: Mapping[str, Tensor] | None) -> SupportEntry:
    try:
        structure = discover(model, like)
        with model_code(type(model).__name__):
            error, faults = _errors(structure, like)
    except DuatError as fault:
        return _refused(model_type, str(fault))
    if not structure.plain_error <= tolerance_for(model.dtype):
        reason = f"duat's instruments change this model: under them its output is off by {structure.plain_error:.1e}"
        return _refused(model_type, reason, structure)
    if not error <= tolerance_for(model.dtype):
        return _refused(model_type, f"the rebuilt output misses the model's by {error:.1e}", structure)
    parts = [*structure.uncovered, *faults]
    return SupportEntry(
        model_type=model_type,
        status="partly" if parts else "exact",
        path=structure.path,
        parts=parts,
        reason=None,
        relative_error=error,
    )


def _errors(structure: ModelStructure, like: Mapping[str, Tensor] | None) -> tuple[float, list[str]]:
    """The certificate's error, and the operators that have no proved factors (each reason once)."""
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
            faults.setdefault(f"cross-attention: {fault}", []).append(run.index)
        try:
            step.operator(run, structure.block(run.index))
        except UnsupportedModelError as fault:
            if not run.attention and str(fault) == NO_MIXING:
                return  # there is nothing to read
            faults.setdefault(str(fault), []).append(run.index)

    given = probe_inputs(structure.stack, like, CHECKED_TOKENS, seed=SEED + 1)
    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, given), listen)
    if len(errors) != len(structure.calls):
        raise UnsupportedModelError("the number of block calls depends on the input")
    worst = max(errors, key=lambda e: (math.isnan(e), e))
    return worst, [f"operator of block {', '.join(map(str, blocks))}: {why}" for why, blocks in faults.items()]


def _refused(model_type: str, reason: str, structure: ModelStructure | None = None) -> SupportEntry:
    return SupportEntry(
        model_type=model_type,
        status="refused",
        path=structure.path if structure else None,
        parts=[],
        reason=reason,
        relative_error=None,
    )
