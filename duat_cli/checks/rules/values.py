"""Rules about the values of the weights, from one pass over the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from duat_cli.checks.places import (
    BlockPlace,
    Heads,
    block_number,
    block_of,
    heads_of,
    is_attention,
    leaf_of,
    outputs_beside,
)
from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.checks.weights import Indices, TensorFacts, distance
from duat_cli.grouping import by_key
from duat_cli.text import clean, listed, plural, shown, some, spans

_HEAD = (
    "lm_head.weight", "embed_out.weight", "predictions.decoder.weight", "generator_lm_head.weight",
    "lm_head.decoder.weight", "vocab_projector.weight",
)  # fmt: skip
_TABLE = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")


def _nonfinite(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    for name, count in evidence.weights.nonfinite.items():
        text = f"{plural(count, 'non-finite value')} (NaN or Inf) in {shown(name)}"
        yield Measurement(count, text, block_number(name), name)
    for file, count in evidence.declared.embedder.nonfinite.items() if evidence.declared else ():
        yield Measurement(count, f"{plural(count, 'non-finite value')} (NaN or Inf) in {clean(file)}", where=file)
    if evidence.overflow is not None:
        yield Measurement(1, f"no weight is NaN or infinite, and {clean(evidence.overflow)}", where="forward")


def _zero_matrices(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Matrices of zeros. They are an error where the hidden states are zero as well, as behind a zero embedding."""
    for name in evidence.weights.zero_matrices:
        yield Measurement(1, f"{shown(name)} is all zero", block_number(name), name, grave=evidence.silent)


def _zero_blocks(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    for place, tensors in evidence.weights.blocks().items():
        matrices = [t for t in tensors.values() if t.matrix]
        if matrices and all(t.zero for t in matrices):
            text = f"all {len(matrices)} matrices of {place} ({shown(place.stack)}) are zero"
            yield Measurement(1, text, place.index, place.stack)


def _duplicates(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Blocks whose matrices all equal those of an earlier block of the same stack."""
    for place, twin, count in _twins(evidence):
        text = f"{place} ({shown(place.stack)}) is a copy of block {twin}: {count} matrices are equal"
        yield Measurement(1, text, place.index, place.stack)


def _twins(evidence: Evidence) -> Iterator[tuple[BlockPlace, int, int]]:
    """Yields each block that is a copy, the number of the earlier one that it copies, and its number of matrices."""
    seen: dict[tuple[object, ...], list[tuple[int, dict[str, TensorFacts]]]] = {}
    for place, tensors in sorted(evidence.weights.blocks().items()):
        matrices = {name: t for name, t in sorted(tensors.items()) if t.matrix}
        if not matrices or all(t.zero for t in matrices.values()):
            continue
        form = (place.stack, *((name, t.entry.shape) for name, t in matrices.items()))
        earlier = seen.setdefault(form, [])
        twin = next((i for i, other in earlier if _same(matrices, other)), None)
        earlier.append((place.index, matrices))
        if twin is not None:
            yield place, twin, len(matrices)


def _equal_matrices(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Equal weights of blocks, without blocks that are whole copies. Buffers, such as masks, are not weights and are
    equal in every block."""
    copies = {place for place, _, _ in _twins(evidence)}
    own = [
        ((t.entry.shape, *t.numbers), name)
        for name, t in evidence.weights.matrices.items()
        if name.endswith(".weight") and not t.zero and (at := block_of(name)) and at[0] not in copies
    ]
    for names in by_key(own).values():
        if len(names) > 1:
            text = f"{len(names)} matrices are equal: {listed(names)}"
            yield Measurement(len(names), text, block_number(names[1]), names[1])


def _same(tensors: dict[str, TensorFacts], others: dict[str, TensorFacts]) -> bool:
    return all(tensor.copies(others[name]) for name, tensor in tensors.items())


def _dead_neurons(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Zero rows and columns of matrices in blocks outside attention; not of embeddings, which may have unused rows."""
    for name, tensor in evidence.weights.matrices.items():
        if block_of(name) is None or is_attention(name) or tensor.zero:
            continue
        yield _zero_share(name, tensor)


def _zero_share(name: str, tensor: TensorFacts) -> Measurement:
    """The share of zeros among rows or columns, whichever is larger."""
    sides = (("rows", tensor.zero_rows, tensor.rows), ("columns", tensor.zero_columns, tensor.columns))
    side, zero, count = max(sides, key=lambda s: len(s[1]) / s[2])
    first = f": {', '.join(map(str, zero[:4]))}{', ...' if len(zero) > 4 else ''}" if len(zero) else ""
    text = f"{len(zero)} of {count} {side} of {shown(name)} are zero{first}"
    return Measurement(len(zero) / count, text, block_number(name), name)


def _constant_heads(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Runs of rows or columns, one head wide, that are all zero: queries, keys, values or outputs of a head.

    Such a head attends in the same way whatever it reads, or adds nothing. Layers that heads share, layers whose names
    do not show what they are, and layers whose shapes do not fit the config's heads are not looked at.
    """
    matrices = evidence.weights.matrices
    for name, tensor in matrices.items():
        heads = heads_of(name, evidence.files.config)
        if heads is None or not is_attention(name) or tensor.zero:
            continue
        side, zero, length = _side(name, heads, matrices)
        width, step = heads.width, _step(name, heads, length, matrices, evidence.files.config)
        found = [] if step is None else _whole_runs(zero, width, step)
        if step is not None and found:
            which = f"head {', '.join(map(str, found[:8]))} of {length // step}"
            if not heads.numbered:
                more = f", and {plural(len(found) - 1, 'other run')} of that width" if len(found) > 1 else ""
                which = f"as wide as the queries, keys or values of a head{more}"
            named = found if heads.numbered else found[:1]
            at = spans(first + k for first in (run * step for run in named) for k in range(width))
            text = f"zero in {shown(name)}: {side} {some(at, 8)}, {which}"
            yield Measurement(len(found), text, block_number(name), name)


def _side(name: str, heads: Heads, matrices: Mapping[str, TensorFacts]) -> tuple[str, Indices, int]:
    """The side along which heads lie: its name, its zero rows or columns, and its length."""
    tensor = matrices[name]
    if heads.made is _inputs_first(name, matrices):
        return "columns", tensor.zero_columns, tensor.columns
    return "rows", tensor.zero_rows, tensor.rows


def _step(
    name: str, heads: Heads, length: int, matrices: Mapping[str, TensorFacts], config: dict[str, Any]
) -> int | None:
    """The distance from one head to the next; None where the shapes do not fit the heads that the config describes.

    A layer with twice the width that the attention's output reads has a gate behind the query of each head
    (Qwen3-Next). If the output does not read the config's heads, the heads of this layer are others: of another kind of
    layer, or of a vision model.
    """
    output = next((other for other in outputs_beside(name) if other in matrices), None)
    read = None if output is None else heads_of(output, config)
    if output is not None and read is not None and not _fit(read, _side(output, read, matrices)[2]):
        return None
    if _fit(heads, length):
        return heads.width
    gated = read is not None and heads.count is not None and length == 2 * heads.count * heads.width
    return 2 * heads.width if gated else None


def _fit(heads: Heads, length: int) -> bool:
    return length % heads.width == 0 and heads.count in (None, length // heads.width)


def _inputs_first(name: str, matrices: Mapping[str, TensorFacts]) -> bool:
    """Whether the matrix is stored (in, out), as in GPT-2: that of queries, keys and values is then wider than high."""
    fused = matrices.get(f"{name.removesuffix('.weight').removesuffix(leaf_of(name))}c_attn.weight")
    return fused is not None and fused.rows < fused.columns


def _whole_runs(zero: Indices, width: int, step: int) -> list[int]:
    """Numbers of the heads whose first `width` of `step` rows or columns are all zero."""
    runs, counts = np.unique(zero[zero % step < width] // step, return_counts=True)
    return [int(run) for run, count in zip(runs, counts, strict=True) if count == width]


def _zero_rows(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Zero rows or columns of token tables, of which some may be unused, and of attention without whole zero heads."""
    whole = {found.where for found in _constant_heads(evidence, settings)}
    for name, tensor in evidence.weights.matrices.items():
        if tensor.zero or name in whole or not (name.endswith(_HEAD + _TABLE) or is_attention(name)):
            continue
        yield _zero_share(name, tensor)


def _tied_by(evidence: Evidence) -> str | None:
    """The source that ties the output to the embedding; None where none does, or the class's default is not known."""
    stated = evidence.files.config.get("tie_word_embeddings")
    if stated is not None:
        return "config.json" if stated is True else None
    known = evidence.declared.resolved if evidence.declared else None
    return "the default of its class" if (known or {}).get("tie_word_embeddings") is True else None


def _tied(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """The distance between output and embedding where they are tied and the files hold both tensors."""
    by, tensors = _tied_by(evidence), evidence.weights.tensors
    if by is None:
        return
    heads = [n for n in tensors if n.endswith(_HEAD) and n not in (evidence.unexpected or ())]
    tables = [n for n in tensors if n.endswith(_TABLE)]
    for head in heads:
        for table in tables:
            one, two = tensors[head], tensors[table]
            if one.entry.shape == two.entry.shape:
                far = distance(one.numbers, two.numbers)
                text = f"{shown(head)} and {shown(table)} are tied by {by} and differ by {far:.2g}"
                yield Measurement(far if math.isfinite(far) else 1.0, text, where=head)


def _scales(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    for name, scales in evidence.weights.scales.items():
        faults = {
            "NaN or infinite": scales.nonfinite,
            "zero": scales.zero,
            f"so large that {shown(name)} is beyond {scales.dtype}": scales.beyond,
        }
        for fault, count in faults.items():
            if count:
                text = f"{count} of {plural(scales.count, 'scale')} in {shown(scales.name)}: {fault}"
                yield Measurement(count, text, block_number(name), scales.name)


RULES = [
    Rule(
        "integrity.scales",
        "scales of quantised weights that are NaN, infinite, zero, or too large for the dtype that the weights had",
        "Quantise the checkpoint again, or fetch it again: one scale stands in front of a whole block of weights.",
        _scales,
        unit="scales",
    ),
    Rule(
        "integrity.nonfinite",
        "NaN and infinite values, of the weights or of what finite weights put out",
        "Go back to the last sound checkpoint: one such value makes every output NaN.",
        _nonfinite,
        unit="values",
        metric="sum",
    ),
    Rule(
        "integrity.zero_matrices",
        "weight matrices that are zero throughout; an error where the hidden states behind one are zero",
        "Find out which step left the tensor at zero; a merge or a conversion that did not know its name is usual.",
        _zero_matrices,
        level="warn",
        unit="matrices",
        metric="sum",
    ),
    Rule(
        "integrity.zero_blocks",
        "blocks whose matrices are all zero",
        "Remove the block from the checkpoint and its config, or restore its weights.",
        _zero_blocks,
        unit="blocks",
        metric="sum",
    ),
    Rule(
        "integrity.duplicate_blocks",
        "blocks that are copies of an earlier one",
        'If the copy is meant (depth up-scaling), set "integrity.duplicate_blocks" = "warn"; else restore the block.',
        _duplicates,
        unit="blocks",
        metric="sum",
    ),
    Rule(
        "integrity.equal_matrices",
        "weight matrices of blocks that are equal to one another, whole copies of blocks left alone",
        "Find out whether they are meant to be shared: a conversion that read one name twice is usual.",
        _equal_matrices,
        level="warn",
        unit="matrices",
    ),
    Rule(
        "integrity.dead_neurons",
        "share of the rows or columns of an FFN matrix that is zero",
        "Prune these neurons for good, or raise `max` where the checkpoint is sparse on purpose.",
        _dead_neurons,
        level="warn",
        max=0.01,
        unit="share",
        metric="largest",
    ),
    Rule(
        "integrity.zero_rows",
        "share of the rows or columns of a table of tokens, or of an attention matrix, that is zero",
        "Fetch the file again: a download that left a gap is usual; or raise `max` where the rows are unused.",
        _zero_rows,
        level="warn",
        max=0.25,
        unit="share",
    ),
    Rule(
        "integrity.constant_heads",
        "attention heads of which queries, keys, values or outputs are zero",
        "Prune the head for good, or restore its weights.",
        _constant_heads,
        level="warn",
        unit="heads",
        metric="sum",
    ),
    Rule(
        "integrity.tied_weights",
        "relative distance between an output matrix and the embedding that it is tied to, by config.json or by default",
        "Drop the output matrix from the file, or set tie_word_embeddings to false: which of both is read differs "
        "between readers.",
        _tied,
        level="warn",
        max=1e-6,
        unit="relative",
    ),
]
