"""Changes of one block between two prompts: of its W', its biases, its terms and its output (Eq. 4 of Wang & Li)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duat_cli.analysis.aggregate import mean_of_all, mean_over
from duat_cli.analysis.compare.alignment import Aligned, every_place
from duat_cli.analysis.compare.states import BlockState, OperatorState
from duat_cli.models.arrays import token_changes, wide
from duat_cli.operators.input_change import PARTS, Routed, change, share_from
from duat_cli.results.compare.report import (
    BlockComparison,
    CrossChange,
    FfnChange,
    HeadChange,
    InputChange,
    NullChange,
)

ZERO = "it is zero under the first prompt"
STILL = "the block's input does not change"
BARELY = STILL + " beyond rounding"
NO_FFN = "no FFN of the block could be told apart"
NO_ROWS = "W' is zero on the aligned tokens"


def relative_change(before: Tensor, after: Tensor, aligned: Aligned) -> float | None:
    """|b - a| / |a| of vectors (N, width) on the aligned tokens, or on all vectors where a block merges places into
    fewer. None where |a| is zero."""
    a, b = _beside(before, after, aligned)
    size = float(a.norm())
    return float((b - a).norm()) / size if size else None


def change_of_tokens(before: Tensor, after: Tensor, aligned: Aligned) -> float | None:
    """|b_t - a_t| / |a_t| of the same vectors, mean over those where a_t is not zero; None where all are."""
    each = token_changes(*_beside(before, after, aligned))
    return float(each.mean()) if len(each) else None


def _beside(before: Tensor, after: Tensor, aligned: Aligned) -> tuple[Tensor, Tensor]:
    if len(before) == len(after) < min(aligned.tokens):
        aligned = every_place(len(before))
    a = wide(before)[aligned.a.to(before.device)].double()
    return a, wide(after)[aligned.b.to(after.device)].double()


def compare_block(
    name: str,
    before: BlockState,
    after: BlockState,
    aligned: Aligned,
    rounding: float,
    sources: Aligned | str | None,
) -> BlockComparison:
    """Compares one block under one pair of prompts. rounding: largest relative change that counts as no move; sources:
    of a decoder, the encoder's tokens that are laid beside each other, or why there are none."""
    operator, heads = _operator(before.operator, after.operator, aligned, aligned)
    into, out = (change_of_tokens(getattr(before, k), getattr(after, k), aligned) for k in ("input", "output"))
    values: dict[str, float | None] = dict.fromkeys(("bias", "ffn", "amplification"))
    values |= {"input": into, "output": out}
    if into is not None and out is not None and into > rounding:
        values["amplification"] = out / into
    reasons: dict[str, str] = {}
    if isinstance(before.bias, str) or isinstance(after.bias, str):
        reasons["bias"] = next(state.bias for state in (before, after) if isinstance(state.bias, str))
    else:
        values["bias"] = relative_change(before.bias, after.bias, aligned)
    ffns = _ffns(before, after, aligned)
    if ffns:
        values["ffn"] = relative_change(_all_terms(before), _all_terms(after), aligned)
    else:
        reasons["ffn"] = NO_FFN
    if values["amplification"] is None:
        reasons["amplification"] = STILL if into == 0.0 else BARELY if into is not None and out is not None else ZERO
    for key, value in values.items():
        if value is None:
            reasons.setdefault(key, ZERO)
    return BlockComparison(
        index=before.index,
        name=name,
        operator=operator,
        heads=heads,
        cross=None if sources is None else _cross(before.cross, after.cross, aligned, sources),
        ffns=ffns if len(ffns) > 1 else [],
        certificate_error=max(before.error, after.error),
        reasons=reasons,
        **values,
    )


def mean_of(rows: Sequence[BlockComparison]) -> BlockComparison:
    """Mean of one block over pairs of prompts. A number that one pair lacks is null, and its reason names the pair."""
    if len(rows) == 1:
        return rows[0]
    whole = _named([row.reasons for row in rows])
    operators = _named([row.operator.reasons for row in rows])
    named = [
        row.model_copy(
            update={
                "heads": [],
                "cross": None,
                "ffns": [],
                "reasons": reasons,
                "operator": row.operator.model_copy(update={"reasons": moved}),
            }
        )
        for row, reasons, moved in zip(rows, whole, operators, strict=True)
    ]
    mean = mean_over(named)
    heads = [mean_over(one) for one in zip(*(row.heads for row in rows), strict=False)]
    ffns = [mean_over(one) for one in zip(*(row.ffns for row in rows), strict=False)]
    return mean.model_copy(update={"heads": heads, "ffns": ffns, "cross": _mean_cross([row.cross for row in rows])})


def _mean_cross(rows: Sequence[CrossChange | None]) -> CrossChange | None:
    known = [row for row in rows if row is not None]
    if not known:
        return None
    reasons = _named([row.reasons for row in known])
    pairs = zip(known, reasons, strict=True)
    mean = mean_over([row.model_copy(update={"heads": [], "reasons": why}) for row, why in pairs])
    heads = zip(*(row.heads for row in known), strict=False)
    return mean.model_copy(update={"heads": [mean_over(one) for one in heads]})


def _named(every: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Reasons of each pair. Each reason names its pair, unless all pairs have the same one."""
    shared = set.intersection(*(set(reasons.items()) for reasons in every))
    return [
        {key: why if (key, why) in shared else f"pair {number}: {why}" for key, why in reasons.items()}
        for number, reasons in enumerate(every, 1)
    ]


def _cross(
    before: OperatorState | str | None, after: OperatorState | str | None, aligned: Aligned, sources: Aligned | str
) -> CrossChange | None:
    """The change of W'_c; None where the block has no cross-attention."""
    if before is None or after is None:
        return None
    sides = next((one for one in (before, after, sources) if isinstance(one, str)), sources)
    if isinstance(sides, str) or isinstance(before, str) or isinstance(after, str):
        found, heads = _no_operator(str(sides)), list[HeadChange]()
    else:
        found, heads = _operator(before, after, aligned, sides)
    return CrossChange(**dict(found), heads=heads)


def _operator(
    a: OperatorState | str, b: OperatorState | str, rows: Aligned, columns: Aligned
) -> tuple[InputChange, list[HeadChange]]:
    """The change of W', and of its heads. rows, columns: the tokens that read, and those that are read."""
    if isinstance(a, str) or isinstance(b, str):
        return _no_operator(next(one for one in (a, b) if isinstance(one, str))), []
    moved = change(a.routed, b.routed, (rows.a, rows.b), a.gram, (columns.a, columns.b))
    if moved.whole is None:
        return _no_operator(NO_ROWS), []
    shares = _shares_left_out([a.routed, b.routed], rows, columns, a.gram)
    whole = {"unaligned_a": shares[0][0], "unaligned_b": shares[1][0]}
    mean = mean_of_all([share[0] for share in shares])
    null = _null(a, b, rows, columns)
    operator = InputChange.explained(NO_ROWS, **moved.whole, **whole, unaligned=mean, null=null)
    if a.routed.channels:  # there are too many channels to list
        return operator, []
    return operator, [
        _head(head, numbers, mean_of_all([share[1][head] for share in shares]))
        for head, numbers in enumerate(moved.heads)
    ]


def _head(number: int, moved: dict[str, float] | None, unaligned: float | None) -> HeadChange:
    parts = moved or dict.fromkeys(PARTS)
    return HeadChange.explained("its part of W' is zero", head=number, **parts, unaligned=unaligned)


def _null(before: OperatorState, after: OperatorState, rows: Aligned, columns: Aligned) -> NullChange:
    """Change of W' with the same scales and uniform attention."""
    even = [before.uniform, after.uniform]
    moved = change(even[0], even[1], (rows.a, rows.b), before.gram, (columns.a, columns.b)).whole
    unaligned = mean_of_all([share for share, _ in _shares_left_out(even, rows, columns, before.gram)])
    relative = None if moved is None else moved["relative"]
    return NullChange.explained(NO_ROWS, relative=relative, unaligned=unaligned)


def _shares_left_out(
    both: Sequence[Routed], rows: Aligned, columns: Aligned, G: Tensor
) -> list[tuple[float | None, list[float | None]]]:
    """Share of each W', and of each of its heads, on the aligned tokens that reads tokens without a partner."""
    lists = zip(both, (rows.a, rows.b), columns.left_out(), strict=True)
    return [share_from(one, reading, read, G) for one, reading, read in lists]


def _no_operator(reason: str) -> InputChange:
    return InputChange.absent(reason, null=NullChange.absent(reason))


def _ffns(before: BlockState, after: BlockState, aligned: Aligned) -> list[FfnChange]:
    if before.terms.keys() != after.terms.keys():
        return []
    found = []
    for module, term in before.terms.items():
        moved = relative_change(term, after.terms[module], aligned)
        found.append(FfnChange.explained(ZERO, module=module, relative=moved))
    return found


def _all_terms(state: BlockState) -> Tensor:
    return torch.cat([wide(term) for term in state.terms.values()], dim=1)
