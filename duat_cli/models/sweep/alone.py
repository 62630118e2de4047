"""Whether each block computes from the hidden states that it takes, and from nothing else of the model's input.

A block that reads what blocks in front of it left beside the stream (in a dictionary, on a module), or the embeddings,
is no map of one stream, and its replay would hold still what it reads. transformers' own types are known: what few of
them hand on so acts through what a replay holds anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, tolerance_for
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.modality import STATES, Given, of_libraries
from duat_cli.models.discovery.structure import DISCOVERY_TOKENS, ModelStructure, probe_inputs, run_stack
from duat_cli.models.instrument.calls import hidden_of
from duat_cli.models.sweep.lockstep import Pass
from duat_cli.models.sweep.passes import BlockPass, Original


def has_own_code(stack: nn.Module) -> bool:
    """Whether any module's class is from elsewhere than the libraries."""
    return not all(map(of_libraries, stack.modules()))


def require_alone(
    structure: ModelStructure,
    run: Callable[[Sequence[Pass]], None],
    like: Mapping[str, Tensor] | None,
    device: str | None = None,
) -> None:
    """UnsupportedModelError for a block that gives something else for the hidden states that it took, where other
    blocks take others, or the model reads another input.

    run: runs passes. like: as of `probe_inputs`; device: None is where the weights are.
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
    """A pass, with what every block call took and gave; or one in which every block call takes what it took in another
    pass, some with noise on top: the others must give what they gave."""

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
        made = hidden_of(output, self.taken[-1]).clone()
        self.made.append(made)
        if self._like is None or number in self._noisy:
            return output
        if not relative_error(made, self._like.made[number]) <= tolerance_for(made.dtype):
            raise UnsupportedModelError(
                f"{parts.name} reads more of what is in front of it than the hidden states that it takes (other "
                "tensors, or what blocks left in a dictionary or on a module): it is no map of one stream"
            )
        return output
