"""Removals of one prompt in one pass of a model, each in a row of the batch; most passes have one row.

A short prompt reads every weight for a few tokens; rows of a batch share the reads. A row that begins in a later block
goes through the blocks before it unchanged, so only rows that begin near each other share a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from duat_cli.models.block.parts import BlockParts
from duat_cli.models.budgets import ROW_BLOCKS, rows_at_once
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.calls import Path, hand_on, mappings_in, with_handed
from duat_cli.models.instrument.mixer import repeated
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
)
from duat_cli.models.terms.sites import Site, watching


class NotInRowsError(Exception):
    """The rows of the batch cannot be told apart in a tensor."""


def in_waves(gone: Sequence[Removals], tokens: int, elements: int) -> list[list[int]]:
    """The removals, by number, that share each pass, in the order of the blocks that they begin in.

    tokens: N of the prompt. No pass has N rows, because rows and tokens could then be mistaken for each other.
    elements: number of elements in the output of one row.
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
    """The pass with each of `gone` removed in a row of its own. Blocks in front of the first removal are not run again.

    forward: runs the prompt, repeated once per row. calls: those of the pass of the prompt alone. weights: as in
    `BlockPass`; not read for these first blocks. last: called with the last block's output, (rows, N, M). With several
    rows, the pass raises NotInRowsError where a term's tensor has no known layout.
    """
    start = min((min(one, default=0) for one in gone), default=0)

    def in_rows(_path: Path, tensor: Tensor) -> Tensor:
        if len(gone) == 1:
            return tensor
        if tensor.shape[:1] != (1,):
            raise NotInRowsError(f"expected one row, got a tensor of shape {tuple(tensor.shape)}")
        return tensor.expand(len(gone), *tensor.shape[1:])

    def block(number: int, parts: BlockParts, original: Original, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(parts.hidden.get(args, kwargs)) != len(gone):  # such as where the pictures of a batch are concatenated
            raise NotInRowsError(f"{parts.name} takes one sequence for the {len(gone)} rows of a batch")
        output = removed(number, parts, original, args, kwargs)
        if number == len(structure.calls) - 1:
            last(parts.hidden.found(output, parts.hidden.get(args, kwargs)))
        return output

    def removed(number: int, parts: BlockParts, original: Original, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if number < start:
            call = calls[number]
            after = call.after.expand(len(gone), *call.after.shape[1:]).clone()
            return _in_rows(parts.hidden.exchanged(call.output, call.before, after), len(gone))
        if number == start:
            hand_on(args, kwargs, with_handed(calls[number].args, calls[number].kwargs, in_rows))
        here = {row: one[number] for row, one in enumerate(gone) if number in one}
        if not here:
            return original(*args, **kwargs)
        before = parts.hidden.get(args, kwargs)
        whole = {row: one.bridge(before[row].clone()) for row, one in here.items() if one.whole}
        if len(whole) == len(gone) and _gives_hidden_alone(calls[number]):
            return parts.hidden.apart(torch.stack([whole[row] for row in range(len(gone))]).to(calls[number].after))
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
        after = parts.hidden.found(output, before).clone()
        for row, hidden in whole.items():
            after[row] = hidden
        return parts.hidden.exchanged(output, before, after)

    return BlockPass(structure, forward, block, weights=weights, start=start)


def run_without(structure: ModelStructure, forward: Forward, recorded: Recorded, gone: Removals) -> Tensor:
    """The output of `without_each` for one removal, run alone."""
    return run_alone(without_each(structure, forward, recorded.calls, [gone]))


def _gives_hidden_alone(call: BlockCall) -> bool:
    """Whether a block returns only hidden states and has no mapping to put tensors into. It then need not run where all
    of it is removed."""
    return isinstance(call.output, Tensor) and not mappings_in(call.args, call.kwargs)


def _in_rows(output: Any, rows: int) -> Any:
    """A block's output with what it gives beside hidden states, once for each row: the choice of keys that later blocks
    share, say."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return type(output)(**dict(zip(output, repeated(output.values(), rows), strict=True)))
    return type(output)(repeated(output, rows))


def _rows(value: Tensor, rows: int, tokens: int) -> Tensor:
    """The tensor as (rows, tokens, ...), if it is, or has both axes merged. Raises NotInRowsError else."""
    if value.ndim > 2 and value.shape[:2] == (rows, tokens):
        return value
    if value.ndim > 1 and value.shape[0] == rows * tokens:
        return value.reshape(rows, tokens, *value.shape[1:])
    raise NotInRowsError(f"expected {rows} rows of {tokens} tokens, got a tensor of shape {tuple(value.shape)}")
