"""Removals of one prompt in one pass of a model, each in a row of the batch; of most there is one.

Short prompts read every weight for a few tokens; side by side they share that. Rows that begin in later blocks go
through the blocks in front of them unchanged, so that only rows which begin near each other go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from duat_cli.models.block.parts import BlockParts
from duat_cli.models.budgets import ROW_BLOCKS, rows_at_once
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.calls import Path, hand_on, hidden_of, mappings_in, with_handed
from duat_cli.models.sweep.lockstep import Weights
from duat_cli.models.sweep.passes import (
    BlockCall,
    BlockPass,
    Calls,
    Forward,
    Original,
    Recorded,
    Removals,
    run_alone,
    with_hidden,
)
from duat_cli.models.terms.sites import Site, watching


class NotInRowsError(Exception):
    """A tensor in which the rows of the batch cannot be told apart."""


def in_waves(gone: Sequence[Removals], tokens: int, elements: int) -> list[list[int]]:
    """Numbers of removals that go side by side, in the order of the blocks that they begin in.

    tokens: N of the prompt; never N rows, for rows and tokens could then be mistaken for each other. elements: of the
    output of one row.
    """
    size = rows_at_once(tokens, elements)
    if size == tokens > 1:
        size -= 1
    starts = [min(one, default=0) for one in gone]
    waves: list[list[int]] = []
    for k in sorted(range(len(gone)), key=starts.__getitem__):
        if waves and len(waves[-1]) < size and starts[k] - starts[waves[-1][0]] <= ROW_BLOCKS:
            waves[-1].append(k)
        else:
            waves.append([k])
    for number, wave in reversed(list(enumerate(waves))):
        if len(wave) == tokens > 1:
            waves.insert(number + 1, [wave.pop()])
    return waves


def without_each(
    structure: ModelStructure,
    forward: Forward,
    calls: Calls,
    gone: Sequence[Removals],
    weights: Weights | None = None,
    last: Callable[[Tensor], None] = lambda _: None,
) -> BlockPass:
    """The pass once more for each of `gone`, taken out in a row of its own; blocks before the first are not run again.

    forward: over the prompt, repeated as often. calls: of the pass of the prompt alone. weights: those that need not be
    read for these blocks, as of `BlockPass`. last: shown the last block's output, (rows, N, M). NotInRowsError, when
    several run, where a term's tensor is laid out in no way that is known.
    """
    start = min((min(one, default=0) for one in gone), default=0)

    def in_rows(_path: Path, tensor: Tensor) -> Tensor:
        if len(gone) == 1:
            return tensor
        if tensor.shape[:1] != (1,):
            raise NotInRowsError(f"expected one row, got a tensor of shape {tuple(tensor.shape)}")
        return tensor.expand(len(gone), *tensor.shape[1:])

    def block(number: int, parts: BlockParts, original: Original, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(parts.hidden.get(args, kwargs)) != len(gone):  # as where pictures of a batch stand behind each other
            raise NotInRowsError(f"{parts.name} takes one sequence for the {len(gone)} rows of a batch")
        output = removed(number, parts, original, args, kwargs)
        if number == len(structure.calls) - 1:
            last(hidden_of(output, parts.hidden.get(args, kwargs)))
        return output

    def removed(number: int, parts: BlockParts, original: Original, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if number < start:
            call = calls[number]
            repeated = call.after.expand(len(gone), *call.after.shape[1:]).clone()
            return with_hidden(call.output, call.before, repeated)
        if number == start:
            hand_on(args, kwargs, with_handed(calls[number].args, calls[number].kwargs, in_rows))
        here = {row: one[number] for row, one in enumerate(gone) if number in one}
        if not here:
            return original(*args, **kwargs)
        before = parts.hidden.get(args, kwargs)
        whole = {row: one.bridge(before[row].clone()) for row, one in here.items() if one.whole}
        if len(whole) == len(gone) and _gives_hidden_alone(calls[number]):
            return torch.stack([whole[row] for row in range(len(gone))]).to(calls[number].after)
        sites = list({site: None for one in here.values() for site in one.masks})

        def edit(site: Site, value: Tensor, index: Tensor | None) -> Tensor:
            rows = _rows(value, len(gone), before.shape[1]).clone()
            chosen = None if index is None else _rows(index, len(gone), before.shape[1])
            for row, one in here.items():
                if site in one.masks:
                    rows[row] = one.edit(site, rows[row], None if chosen is None else chosen[row])
            return rows.reshape(value.shape)

        with here[0].active() if len(gone) == 1 else watching(sites, edit):
            output = original(*args, **kwargs)
        if not whole:
            return output
        after = hidden_of(output, before).clone()
        for row, hidden in whole.items():
            after[row] = hidden
        return with_hidden(output, before, after)

    return BlockPass(structure, forward, block, weights=weights, start=start)


def run_without(structure: ModelStructure, forward: Forward, recorded: Recorded, gone: Removals) -> Tensor:
    """The output of `without_each` of one, run alone."""
    return run_alone(without_each(structure, forward, recorded.calls, [gone]))


def _gives_hidden_alone(call: BlockCall) -> bool:
    """Whether a block gives nothing beside hidden states, and has no mapping to put anything into: it need not run
    where all of it is gone."""
    return isinstance(call.output, Tensor) and not mappings_in(call.args, call.kwargs)


def _rows(value: Tensor, rows: int, tokens: int) -> Tensor:
    """(rows, tokens, ...) of a tensor of that shape, or with both axes in one."""
    if value.ndim > 2 and value.shape[:2] == (rows, tokens):
        return value
    if value.ndim > 1 and value.shape[0] == rows * tokens:
        return value.reshape(rows, tokens, *value.shape[1:])
    raise NotInRowsError(f"expected {rows} rows of {tokens} tokens, got a tensor of shape {tuple(value.shape)}")
