"""The tensors that moved, in the order of depth and as one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from duat_cli.checks.places import BlockPlace, block_of
from duat_cli.grouping import by_key
from duat_cli.text import clean, indices, plural, shown

_BEFORE, _BEHIND = -1.0, math.inf
_EMBEDDING = re.compile(r"(?:^|[._])(?:embed(?!_out)|embeddings?|wte|wpe|shared|emb)(?:[._]|$)|word_embeddings")
_GROUPS = 4  # kinds of tensors that a sentence names


class Depths:
    """The depth of tensors: -1 in front of the blocks, the number of their block, inf behind the blocks."""

    def __init__(self, blocks: Sequence[str] = ()) -> None:
        """blocks: module names of the blocks in the order of depth; empty if the model was not run."""
        self._numbers = {name: number for number, name in enumerate(blocks)}

    def of_tensor(self, name: str) -> float:
        place = block_of(name)
        if place is None:
            return _BEFORE if _EMBEDDING.search(name) else _BEHIND
        return self.of_block(place[0])

    def of_block(self, place: BlockPlace) -> int:
        """The number of a block by its module's name, where either name may lack a prefix; else that in its stack."""
        own = f"{place.stack}.{place.index}".lstrip(".")
        for name, number in self._numbers.items():
            if name == own or name.endswith(f".{own}") or own.endswith(f".{name}"):
                return number
        return place.index


def moved_tensors(moved: Sequence[str], tensors: Iterable[str], depths: Depths) -> str:
    """A sentence such as: 24 tensors moved, first 'model.layers.0.self_attn.q_proj.weight': all of q_proj and v_proj in
    blocks 0-5."""
    every = set(tensors)
    first = min(moved, key=depths.of_tensor)
    count = f"all {len(every)} tensors" if every <= set(moved) else plural(len(moved), "tensor")
    said = f"{count} moved, first {shown(first)}"
    if every <= set(moved):
        return said
    groups = _groups(moved, every)
    more = len(groups) - _GROUPS
    named = [*groups[:_GROUPS], *([f"{more} more kinds"] if more > 0 else [])]
    return f"{said}: {'; '.join(named)}"


def _groups(moved: Sequence[str], every: set[str]) -> list[str]:
    """Texts on the kinds of tensors that moved in the same blocks, the largest first; then tensors outside blocks."""
    kinds, known = _blocks_by_kind(moved), _blocks_by_kind(every)
    alike = by_key(((stack, frozenset(at)), kind) for (stack, kind), at in kinds.items())
    stacks = {stack for stack, _ in kinds}
    found = []
    for (stack, blocks), names in sorted(alike.items(), key=lambda pair: -len(pair[0][1]) * len(pair[1])):
        inside = {kind for s, kind in known if s == stack and known[s, kind] >= blocks}
        where = indices("block", sorted(blocks)) + (f" of {clean(stack)}" if len(stacks) > 1 else "")
        if len(names) > 1 and set(names) == inside:
            found.append(f"all of {where}")
        else:
            found.append(f"{'all of ' if len(blocks) > 1 else ''}{_together(names)} in {where}")
    return [*found, *(shown(name) for name in moved if block_of(name) is None)]


def _blocks_by_kind(names: Iterable[str]) -> dict[tuple[str, str], set[int]]:
    """(stack, name within a block) -> the blocks that have such a tensor."""
    places = (block_of(name) for name in names)
    found = by_key(((place[0].stack, place[1]), place[0].index) for place in places if place)
    return {kind: set(blocks) for kind, blocks in found.items()}


def _together(kinds: list[str]) -> str:
    """A text such as: q_proj and v_proj. Names are cut to their last part if that tells them apart."""
    short = [re.sub(r"\.(weight|bias)$", "", kind) for kind in kinds]
    last = [name.rpartition(".")[2] for name in short]
    names = [clean(name) for name in (last if len(set(last)) == len(last) else kinds)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
