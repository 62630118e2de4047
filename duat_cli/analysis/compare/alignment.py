"""Alignment of the tokens of two prompts: the longest common subsequence of their ids, or place by place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.errors import InputError, needed
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.modality import STATES

ONE_SIZE = (
    "so that one place in both is another part of them; compared is place by place: give pictures of one size, sounds "
    "of one length"
)


@dataclass(frozen=True)
class Stretch:
    """Run of `tokens` tokens that follow one another in both prompts, from place `a` of one and `b` of the other."""

    a: int
    b: int
    tokens: int
    same: bool = True
    """Whether both have the same ids there."""


@dataclass(frozen=True)
class Aligned:
    """Pairs of tokens, in order: place `a[k]` of one prompt is laid beside place `b[k]` of the other."""

    a: Tensor  # (n,), int64, ascending
    b: Tensor
    same: Tensor
    """Whether their ids are equal, (n,)."""
    tokens: tuple[int, int]
    """How many tokens the two prompts have."""

    def stretches(self) -> list[Stretch]:
        """The pairs as runs of tokens, in order."""
        found: list[Stretch] = []
        for a, b, same in zip(self.a.tolist(), self.b.tolist(), self.same.tolist(), strict=True):
            last = found[-1] if found else None
            if last and (last.a + last.tokens, last.b + last.tokens, last.same) == (a, b, same):
                found[-1] = Stretch(last.a, last.b, last.tokens + 1, same)
            else:
                found.append(Stretch(a, b, 1, same))
        return found

    def is_beginning(self) -> bool:
        """Whether the pairs are a common beginning of the prompts, at least one of which goes on behind it."""
        first = torch.arange(len(self.a))
        if len(first) == max(self.tokens):
            return False
        return torch.equal(self.a, first) and torch.equal(self.b, first) and bool(self.same.all())

    def left_out(self) -> tuple[Tensor, Tensor]:
        """The places of each prompt that have no partner."""
        return _others(self.a, self.tokens[0]), _others(self.b, self.tokens[1])


def align(
    a: Sequence[int], b: Sequence[int], names: tuple[str, str], special: Collection[int] = frozenset()
) -> Aligned:
    """The longest common subsequence of two lists of ids. Raises InputError where they share no ordinary token.

    names: the two prompts' names, for the message. special: ids that a tokenizer puts into every prompt. Matching as
    many ordinary ids as possible takes precedence over these.
    """
    pairs = common(a, b, special)
    if all(a[place] in special for place, _ in pairs):
        but = " but special ones" if pairs else ""
        raise InputError(
            f"{names[0]} and {names[1]}: no token of one is in the other{but} ({len(a)} and {len(b)} tokens), so there "
            "is nothing to compare; give prompts that share some text"
        )
    return _aligned(pairs, a, b)


def align_places(a: Sequence[int], b: Sequence[int], names: tuple[str, str], *, patched: bool = False) -> Aligned:
    """Pairs every token with the one at its place. Raises InputError where the prompts differ in length.

    names: the two prompts' names, for the message. patched: whether parts of one are put into the pass of the other.
    """
    if len(a) != len(b):
        option, way = "--align position", "--align text compares the tokens that both have"
        if patched:
            option, way = "--patch", "what is b's stands in its place in a: exchange words for others of as many tokens"
        raise InputError(
            f"{option}: {names[0]} has {len(a)} tokens and {names[1]} {len(b)}, expected as many in both; {way}"
        )
    return _aligned([(k, k) for k in range(len(a))], a, b)


def align_inputs(a: Prompt, b: Prompt) -> Aligned:
    """Pairs every position of two pictures, videos or sounds with the one at its place, except those that a mask leaves
    out. Raises InputError where the places differ: in number, in a mask, or in the sizes of a grid."""
    counts = a.input_ids.shape[1], b.input_ids.shape[1]
    if counts[0] != counts[1]:
        raise InputError(f"{a.text} has {counts[0]} positions and {b.text} {counts[1]}, {ONE_SIZE}")
    ours, theirs = _layout(a), _layout(b)
    if other := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
        raise InputError(f"{a.text} and {b.text}: other {other[0]}, {ONE_SIZE}")
    kept = torch.ones(counts, dtype=torch.bool)[0]
    for name, mask in (a.prepared or {}).items():  # such as the mask of patches that only fill up a picture (SigLIP 2)
        kept &= mask[0] != 0 if name.endswith("attention_mask") and mask.shape == a.input_ids.shape else True
    return every_place(counts[0], kept.nonzero()[:, 0].tolist())


def sources_of(a: Prompt, b: Prompt, names: tuple[str, str], special: Collection[int], by_place: bool) -> Aligned | str:
    """Pairs the encoder's states that two decoder's prompts read: those of the same tokens of texts, or of one place;
    or why it cannot. by_place: whether tokens of texts are paired by their places, where they are as many."""
    first, second = needed(a.source), needed(b.source)
    counts = [needed(prompt.prepared)[STATES].shape[1] for prompt in (a, b)]
    texts = first.of_tokens and second.of_tokens
    if counts[0] == counts[1] and (by_place or not texts):
        return every_place(counts[0])
    if not texts:
        return f"the encoder gives {counts[0]} vectors of {names[0]} and {counts[1]} of {names[1]}, {ONE_SIZE}"
    ids = first.input_ids[0].tolist(), second.input_ids[0].tolist()
    try:
        return align(*ids, (f"the encoder's tokens of {names[0]}", names[1]), special)
    except InputError as fault:
        return str(fault)


def every_place(count: int, some: Sequence[int] | None = None) -> Aligned:
    """Pairs each position of two inputs of equal length with its own place. some: only these positions."""
    return _aligned([(k, k) for k in some or range(count)], range(count), range(count))


def _layout(prompt: Prompt) -> dict[str, list[Any]]:
    """Tensors that set the places of the positions: masks and sizes. Those that are all ones are left out."""
    every = (prompt.prepared or {}).items()
    return {name: one.tolist() for name, one in every if not one.is_floating_point() and not bool((one == 1).all())}


def align_ends(a: Sequence[int], b: Sequence[int], count: int) -> Aligned:
    """Pairs the last `count` tokens of both, which are equal."""
    assert list(a[-count:]) == list(b[-count:])
    return _aligned([(len(a) - count + k, len(b) - count + k) for k in range(count)], a, b)


def common_end(lists: Sequence[Sequence[int]]) -> int:
    """How many last ids all lists have in common."""
    count = 0
    for ids in zip(*(reversed(ids) for ids in lists), strict=False):
        if len(set(ids)) > 1:
            break
        count += 1
    return count


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first ids two lists have in common."""
    return common_end([one[::-1], other[::-1]])


def common(a: Sequence[int], b: Sequence[int], special: Collection[int] = frozenset()) -> list[tuple[int, int]]:
    """A common subsequence with most ids that are not special and, of those, the longest; as pairs of places.

    Each row of the table of lengths follows from the one above by one running maximum. The common beginning and end of
    the lists are set aside first.
    """
    head = common_start(a, b)
    tail = common_end([a[head:], b[head:]])
    middle = _table(a[head : len(a) - tail], b[head : len(b) - tail], special)
    ends = [(len(a) - tail + k, len(b) - tail + k) for k in range(tail)]
    return [*((k, k) for k in range(head)), *((head + i, head + j) for i, j in middle), *ends]


def _table(a: Sequence[int], b: Sequence[int], special: Collection[int]) -> list[tuple[int, int]]:
    if not a or not b:
        return []
    ordinary = 1 + min(sum(token in special for token in ids) for ids in (a, b))  # outweighs all special ones
    other = torch.tensor(b)
    lengths = torch.zeros(len(a) + 1, len(b) + 1, dtype=torch.int32)  # [i, j]: for the first i and first j ids
    for i, token in enumerate(a):
        above = lengths[i]
        longer = torch.maximum(above[1:], above[:-1] + (other == token).int() * (1 if token in special else ordinary))
        lengths[i + 1, 1:] = longer.cummax(0).values
    found, i, j = [], len(a), len(b)
    while i and j:
        here = int(lengths[i, j])
        if here == int(lengths[i - 1, j]):
            i -= 1
        elif here == int(lengths[i, j - 1]):
            j -= 1
        else:
            i, j = i - 1, j - 1
            found.append((i, j))
    return found[::-1]


def _aligned(pairs: Sequence[tuple[int, int]], a: Sequence[int], b: Sequence[int]) -> Aligned:
    first, second = (torch.tensor(places, dtype=torch.int64) for places in zip(*pairs, strict=True))
    same = torch.tensor([a[i] == b[j] for i, j in pairs])
    return Aligned(first, second, same, (len(a), len(b)))


def _others(places: Tensor, tokens: int) -> Tensor:
    rest = torch.ones(tokens, dtype=torch.bool)
    rest[places] = False
    return rest.nonzero()[:, 0]
