"""Parameters that a class ties and the files hold twice, for a model whose weights are read in parts."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from duat_cli.compat.transformers import targets_of, tied_keys
from duat_cli.loading.checkpoint.parts import ROWS_BYTES
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.reader import Reader
from duat_cli.loading.checkpoint.stored import STORED


def tie_equal(model: PreTrainedModel, files: CheckpointFiles) -> set[str]:
    """Ties the parameters whose stored values are equal, as transformers does when it loads the whole model; on `meta`
    it compares nothing and leaves them apart. Returns the tensors of the files that are then copies of others.

    Quantised weights, and weights that are changed as they are read, stay apart.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    apart = [(a, b) for a, b in tied_keys(model).items() if a in held and b in held and held[a] is not held[b]]
    copies: set[str] = set()
    if not apart:
        return copies
    stored = [name for name, entry in files.tensors.items() if entry.dtype in STORED and entry.made is None]
    targets = targets_of(model, stored).items()  # buffers among them
    tensors = {id(held[to]): name for name, (to, changed) in targets if to in held and not changed}
    for target, source in apart:
        copy, original = tensors.get(id(held[target])), tensors.get(id(held[source]))
        if copy is None or original is None or not _equal(files, copy, original, model.dtype):
            continue
        for name in [name for name, parameter in held.items() if parameter is held[target]]:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, held[source])
        copies.add(copy)
    return copies


def _equal(files: CheckpointFiles, one: str, other: str, dtype: torch.dtype) -> bool:
    """Whether two tensors have equal values in this dtype; some rows are read at a time."""
    shape, reader = files.tensors[one].shape, Reader(files)
    if shape != files.tensors[other].shape or 0 in shape:
        return False
    step = max(1, ROWS_BYTES * shape[0] // files.tensors[one].bytes)
    parts = (range(start, min(start + step, shape[0])) for start in range(0, shape[0], step))
    return all(torch.equal(*(reader.rows(name, part).to(dtype) for name in (one, other))) for part in parts)
