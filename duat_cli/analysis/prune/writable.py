"""Whether a checkpoint without a set could be written, told before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.analysis.prune.repair.standing import require_biases
from duat_cli.errors import UnsupportedModelError
from duat_cli.kinds import WHOLE, Kind
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.discovery.structure import discover


def require_writable(loaded: LoadedModel, kinds: Sequence[Kind], count: int | None, *, means: bool) -> None:
    """Raises UnsupportedModelError where no set of these kinds could be written: all blocks are one module (ALBERT's),
    so that no whole part of one can be taken out of its weights, or a layer has no bias that could hold means.

    count: size of the set; None where it is not known yet. means: whether the means of what is removed stay.
    """
    whole = WHOLE.issuperset(kinds)
    if not whole and not means:
        return
    structure = discover(loaded.model, loaded.like, factors=False)
    calls = structure.calls
    if whole and len(set(calls)) == 1 < len(calls) and (count is None or count % len(calls)):
        raise UnsupportedModelError(
            f"--apply: all {len(calls)} blocks are one module: none can be taken out of its weights alone; --export "
            "FILE.json writes the set"
        )
    if means:
        require_biases(loaded.model, structure, kinds, loaded.like)
