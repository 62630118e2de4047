"""Tensors of integers that are not quantised weights; only the class of the model tells them apart, no header does."""

from __future__ import annotations

from duat_cli.checks.rules.files import no_floats
from duat_cli.errors import DuatError
from duat_cli.loading.checkpoint.preflight import CheckpointFiles


def tables(files: CheckpointFiles, trust_remote_code: bool) -> frozenset[str]:
    """Names of the tensors without floating-point numbers, such as indices and masks, that the class holds so in a
    buffer, or that it knows but leaves out.

    Empty where the class cannot be built, or torch is not installed. torch is imported only for a checkpoint with
    such tensors.
    """
    names = no_floats(files)
    if not names:
        return frozenset()
    try:
        from duat_cli.compat.transformers import targets_of
        from duat_cli.loading.model.load import fit_of

        fit = fit_of(files, "float32", trust_remote_code)
    except (DuatError, ImportError):
        return frozenset()
    model, state = fit.model, fit.model.state_dict()
    weights = {name for name, (target, _) in targets_of(model, names).items() if state[target].is_floating_point()}
    prefix = f"{model.base_model_prefix}."
    whole = {name.removeprefix(prefix) for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    computed = {name for name in fit.unexpected if name.removeprefix(prefix) in whole}  # buffers that are not saved
    return frozenset(names) - weights - (set(fit.unexpected) - computed)
