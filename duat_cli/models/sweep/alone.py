"""Test of whether each block computes from its hidden states alone, and from nothing else of the model's input.

A block that reads the embeddings, or tensors that earlier blocks left beside the stream (in a dictionary, on a module),
is no map of one stream, and a replay would wrongly hold what it reads. The model types of transformers are known: the
few that hand on tensors in this way use them only in what a replay holds anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, tolerance_for
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, STATES, Given, of_libraries, probe_inputs
from duat_cli.models.discovery.structure import ModelStructure, run_stack
from duat_cli.models.sweep.lockstep import Pass
from duat_cli.models.sweep.passes import BlockPass, Original


def has_own_code(stack: nn.Module) -> bool:
    """Whether the class of some module comes from outside the known libraries."""
    return not all(map(of_libraries, stack.modules()))


def require_alone(
    structure: ModelStructure,
    run: Callable[[Sequence[Pass]], None],
    like: Mapping[str, Tensor] | None,
    device: str | None = None,
) -> None:
    """Raises UnsupportedModelError for a block whose output, for its own hidden states, changes when other blocks are
    given other hidden states or the model another input.

    run: runs passes. like: as in `probe_inputs`. device: None for that of the weights.
    """
    if not has_own_code(structure.stack):
        return
    count = len(structure.calls)
    given, other = (probe_inputs(structure.stack, like, DISCOVERY_TOKENS, device, seed) for seed in (0, 1))
    if isinstance(other, Tensor):
        other = other.roll(1, -1)
    elif STATES in other and not isinstance(given, Tensor):  # those of an encoder, which cross-attention reads
        other = {**other, STATES: given[STATES]}
    first = _Kept(structure, given)
    run([first])
    disturbed = [_Kept(structure, given, first, numbers) for numbers in ({0}, range(0, count, 2), range(1, count, 2))]
    run([*disturbed, _Kept(structure, other, first)])


class _Kept(BlockPass):
    """A pass that keeps the hidden states that every block call takes and gives. With `like`, every call is given those
    of that pass, with noise on top for the calls `noisy`; all others must give what they gave there."""

    def __init__(
        self, structure: ModelStructure, given: Given, like: _Kept | None = None, noisy: Collection[int] = ()
    ) -> None:
        super().__init__(structure, lambda: run_stack(structure.stack, given), self._call)
        self._like, self._noisy = like, noisy
        self.taken: list[Tensor] = []
        self.made: list[Tensor] = []

    def _call(self, number: int, parts: BlockParts, original: Original, args: Any, kwargs: Any) -> Any:
        x = parts.hidden.get(args, kwargs).clone() if self._like is None else self._like.taken[number]
        self.taken.append(x + random_like(x) if number in self._noisy else x)
        args, kwargs = parts.hidden.put(args, kwargs, self.taken[-1].clone())  # blocks may write to it
        output = original(*args, **kwargs)
        made = parts.hidden.found(output, self.taken[-1]).clone()
        self.made.append(made)
        if self._like is None or number in self._noisy:
            return output
        if not relative_error(made, self._like.made[number]) <= tolerance_for(made.dtype):
            raise UnsupportedModelError(
                f"{parts.name} reads more of what is in front of it than the hidden states that it takes (other "
                "tensors, or what blocks left in a dictionary or on a module): it is no map of one stream"
            )
        return output
