"""The numbers of one parameter's change: size, ranks, and its directions relative to the base weight's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.lora.weights.change import Change
from duat_cli.cache.tensors import TensorCache
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.operators.leading import leading
from duat_cli.operators.lowrank import (
    EXACT_SIDE,
    LowRank,
    Piece,
    Ranks,
    Triplets,
    energy,
    ranks,
    rounding_floor,
    singular,
    spectrum,
    svd_error,
    written_out,
)
from duat_cli.results.weight_change import Alignment, Intruders, ModuleChange, Rounding

SHOWN = 16  # leading singular values in the report
DIRECTIONS = 10  # k in alignment and intruders (Shuttleworth et al. 2024)
EPSILON = 0.5
_SPECTRAL = (
    "spectral_norm", "numerical_rank", "stable_rank", "entropy_rank", "energy_rank_90", "singular_values",
)  # fmt: skip
_WHOLE = ("numerical_rank", "entropy_rank", "energy_rank_90")  # need all singular values
LARGE = f"more than {EXACT_SIDE} wide: computed with --directions"
VECTOR = "a vector has no spectrum"
ZERO = "the change is zero"
NOT_FOUND = "the leading directions of the change did not converge"
NO_NORM = "the norm in front is found with prompts"


@dataclass(frozen=True)
class Numbers:
    """Numbers of one change, before they are put into the report."""

    frobenius: float
    values: Tensor | None  # singular values, descending: all, or the leading ones; None for a vector
    ranks: Ranks | None  # None unless all singular values are known and one is not zero
    partial: bool = False  # whether only leading singular values are known


def numbers_of(change: Change, *, large: bool = True) -> Numbers:
    """Norm and spectrum of a change; the pieces of a stack count as one block-diagonal matrix.

    large: whether to find all singular values of a large dense difference, which takes minutes, or only the leading.
    """
    first = change.pieces[0]
    if isinstance(first, Tensor) and first.ndim < 2:
        return Numbers(float(first.norm()), None, None)
    dense = [piece for piece in change.pieces if isinstance(piece, Tensor)]
    norm = float(torch.stack([piece.norm() for piece in dense]).norm()) if dense else 0.0
    if not large and any(min(piece.shape) > EXACT_SIDE for piece in dense):
        found = [_leading_values(piece) for piece in dense]
        tops = [values for values in found if values is not None]
        known = torch.cat(tops).sort(descending=True).values[:SHOWN] if len(tops) == len(found) else None
        return Numbers(norm, known, None, partial=True)
    values = torch.cat([spectrum(piece) for piece in change.pieces]).sort(descending=True).values
    eps = torch.finfo(torch.float64 if isinstance(first, LowRank) else torch.float32).eps
    return Numbers(norm or float(values.norm()), values, ranks(values, tuple(first.shape), float(eps)))


def _leading_values(piece: Tensor) -> Tensor | None:
    """The SHOWN leading singular values, or fewer that hold all of the energy; None where they did not converge."""
    found = _leading(piece.float(), SHOWN, fewer=True)
    if found is None or (len(found.values) < SHOWN and float(found.values.norm()) < 0.9999 * float(piece.norm())):
        return None
    return found.values


@dataclass(frozen=True)
class Directions:
    """Options of the search for leading directions of large matrices."""

    large: bool = False
    """Whether to search where a dense SVD would take long; by Lanczos, which takes seconds for each matrix."""
    cache: bool = True


def module_change(
    change: Change,
    numbers: Numbers | None,
    base: Tensor | None,
    why_no_base: str,
    directions: Directions,
    base_energy: float | None = None,
) -> ModuleChange:
    """The report's entry. base: the stored base parameter, or None, with the reason `why_no_base`. base_energy: that of
    `base`, if known."""
    plan = change.plan
    reasons: dict[str, str] = {}
    shape = plan.place.shape if plan.place is not None else _own_shape(change)
    relative, alignment, intruders = None, None, None
    relative_to = plan.other_base or "base"
    if relative_to != "base":
        base, why_no_base = None, f"the change is relative to a base that {relative_to} changed"
    if numbers is None:
        why = change.fault or "unknown"
        reasons |= dict.fromkeys(("frobenius_norm", *_SPECTRAL, "relative_frobenius", "alignment", "intruders"), why)
    elif base is None:
        reasons |= dict.fromkeys(("relative_frobenius", "alignment", "intruders"), why_no_base)
    else:
        size = (energy(base) if base_energy is None else base_energy) ** 0.5
        relative = numbers.frobenius / size if size and math.isfinite(size) else None
        if relative is None:
            reasons["relative_frobenius"] = (
                "the base parameter holds NaN or Inf" if size else "the base parameter is zero"
            )
        alignment, intruders, absent = _to_base(change, numbers, base, directions)
        reasons |= absent
    values, known, stable = None, None, None
    if numbers is not None:
        values, known = numbers.values, numbers.ranks
        stable = known.stable if known else None
        if numbers.partial:
            reasons |= dict.fromkeys(_WHOLE if values is not None else _SPECTRAL, LARGE)
            stable = None if values is None else numbers.frobenius**2 / float(values[0]) ** 2
        elif known is None:
            reasons |= dict.fromkeys(_SPECTRAL, VECTOR if values is None else ZERO)
            values = None
    if plan.rank is None:
        reasons["rank"] = "the method states none"
    if plan.scaling is None:
        reasons["scaling"] = "the method has none"
    return ModuleChange(
        name=plan.module,
        parameter=plan.parameter.rpartition(".")[2],
        kind=plan.kind,
        shape=list(shape),
        rank=plan.rank,
        scaling=plan.scaling,
        relative_to=relative_to,
        frobenius_norm=numbers.frobenius if numbers is not None else None,
        relative_frobenius=relative,
        spectral_norm=float(values[0]) if values is not None else None,
        numerical_rank=known.numerical if known else None,
        stable_rank=stable,
        entropy_rank=known.entropy if known else None,
        energy_rank_90=known.energy_90 if known else None,
        singular_values=values[:SHOWN].tolist() if values is not None else None,
        alignment=alignment,
        intruders=intruders,
        sup_local=None,
        added_rows=change.added_rows,
        reasons={**reasons, "sup_local": NO_NORM},
    )


def _own_shape(change: Change) -> tuple[int, ...]:
    if not change.pieces:
        return ()
    shape = tuple(change.pieces[0].shape)
    return (len(change.pieces), *shape) if len(change.pieces) > 1 else shape


def rounding(before: Tensor, after: Tensor, difference: Tensor, numbers: Numbers) -> Rounding | None:
    """The rank of a change above what rounding makes. before, after: the matrices as stored; difference: after -
    before, float64; numbers: those of the difference."""
    if numbers.values is None or not len(numbers.values):
        return None
    off = svd_error(tuple(difference.shape), float(numbers.values[0]), partial=numbers.partial)
    floor = rounding_floor(before, after, difference) + off
    above = int((numbers.values > floor).sum())
    open_ended = numbers.partial and above == SHOWN
    return Rounding.explained(
        f"{above} at least; {LARGE}",
        dtype=str(after.dtype).removeprefix("torch."),
        floor=floor,
        rank_above_floor=None if open_ended else above,
    )


# --- against the base ---------------------------------------------------------------------------------------


def _to_base(
    change: Change, numbers: Numbers, base: Tensor, directions: Directions
) -> tuple[Alignment | None, Intruders | None, dict[str, str]]:
    piece = change.pieces[0]
    why = None
    if numbers.values is None and not numbers.partial:
        why = VECTOR
    elif min(base.shape) > EXACT_SIDE and not directions.large:
        why = LARGE
    elif numbers.ranks is None:
        why = ZERO
    elif len(change.pieces) > 1:
        why = "a stack of experts has no single base matrix"
    elif change.added_rows or tuple(base.shape) != tuple(piece.shape):
        why = "the base has another shape"
    elif not bool(base.isfinite().all()):
        why = "the base parameter holds values that are not finite"
    if why is not None:
        return None, None, {"alignment": why, "intruders": why}
    assert numbers.ranks is not None
    if min(base.shape) <= EXACT_SIDE:
        return _exactly(change.plan, piece, numbers.ranks, base.double())
    return _by_lanczos(change.plan, piece, numbers.ranks, base, directions.cache)


def _exactly(
    plan: ParameterPlan, piece: Piece, known: Ranks, base: Tensor
) -> tuple[Alignment | None, Intruders | None, dict[str, str]]:
    """Alignment and intruders, from dense SVDs of the base and of the tuned weight."""
    u, s, vh = torch.linalg.svd(base, full_matrices=False)
    tu, _, tvh = torch.linalg.svd(base + written_out(piece), full_matrices=False)
    k = min(DIRECTIONS, len(s))
    first = int((tu[:, :k].mT @ u).abs().amax(1).lt(EPSILON).sum())
    second = int((tvh[:k] @ vh.mT).abs().amax(1).lt(EPSILON).sum())
    aligned = _alignment(plan, piece, known, Triplets(u[:, :k], s[:k], vh[:k].mT))
    output, into = (second, first) if plan.inputs_first else (first, second)
    reasons = {"alignment": NOT_FOUND} if aligned is None else {}
    return aligned, Intruders(k=k, epsilon=EPSILON, output=output, input=into), reasons


def _by_lanczos(
    plan: ParameterPlan, piece: Piece, known: Ranks, stored: Tensor, cache: bool
) -> tuple[Alignment | None, Intruders | None, dict[str, str]]:
    """Alignment and intruders, from the leading parts of x -> Wx and x -> Wx + L(Rx). Let c be a tuned vector's
    components along the base directions that were found: no other base vector can have a cosine above sqrt(1 - |c|²).
    Where that does not settle a count, the count is None."""
    apply, back = _products(piece)
    base = stored.float()
    count = min(3 * DIRECTIONS, *base.shape)
    own = _of_base(stored, base, count, cache)
    if own is None:
        why = "the base's leading directions did not converge"
        return None, None, {"alignment": why, "intruders": why}
    k = DIRECTIONS
    aligned = _alignment(plan, piece, known, Triplets(own.left[:, :k], own.values[:k], own.right[:, :k]))
    reasons = {"alignment": NOT_FOUND} if aligned is None else {}
    tuned = leading(lambda x: base @ x + apply(x), lambda y: base.mT @ y + back(y), base[0], base.shape[1], k)
    if tuned is None:
        return aligned, None, {**reasons, "intruders": "the tuned weight's leading directions did not converge"}
    first, second = _count(tuned.left, own.left), _count(tuned.right, own.right)
    output, into = (second, first) if plan.inputs_first else (first, second)
    why = f"not settled by the base's {count} leading directions"
    return aligned, Intruders.explained(why, k=k, epsilon=EPSILON, output=output, input=into), reasons


def _of_base(stored: Tensor, base: Tensor, count: int, cache: bool) -> Triplets | None:
    """The base's leading directions, from the cache if the same tensor was seen before."""
    raw = stored.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    key = hashlib.sha256(f"{tuple(stored.shape)} {stored.dtype} {count}".encode())
    key.update(raw.data)
    kept = TensorCache(f"directions-{key.hexdigest()[:32]}", enabled=cache)
    left, values, right = (kept.get(name) for name in ("left", "values", "right"))
    if left is not None and values is not None and right is not None:
        return Triplets(left, values, right)
    found = _leading(base, count)
    if found is not None:
        kept.put("left", found.left)
        kept.put("values", found.values)
        kept.put("right", found.right)
        kept.save()
    return found


def _count(tuned: Tensor, base: Tensor) -> int | None:
    cosines = (tuned.mT @ base).abs()
    close = cosines.amax(1) >= EPSILON
    rest = (1 - cosines.square().sum(1)).clamp_min(0).sqrt()
    return int((~close).sum()) if bool((close | (rest < EPSILON)).all()) else None


def _products(piece: Piece) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    if isinstance(piece, LowRank):
        left, right = piece.left.float(), piece.right.float()
        return (lambda x: left @ (right @ x)), (lambda y: right.mT @ (left.mT @ y))
    dense = piece.float()
    return (lambda x: dense @ x), (lambda y: dense.mT @ y)


def _alignment(plan: ParameterPlan, piece: Piece, known: Ranks, base: Triplets) -> Alignment | None:
    """|U_baseᵀ U_change|² / min(k, j) for outputs and inputs, each with its value for a uniformly random subspace,
    max(k, j) / side."""
    found = leading_of(piece, min(known.numerical, DIRECTIONS))
    if found is None:
        return None
    k, j = len(base.values), len(found.values)
    shares = []
    for b, c in ((base.left, found.left), (base.right, found.right)):
        energy = float((b.mT.double() @ c.double()).square().sum())
        shares.append((min(energy / min(k, j), 1.0), max(k, j) / b.shape[0]))
    rows, columns = shares
    out, into = (columns, rows) if plan.inputs_first else (rows, columns)
    return Alignment(
        k=k, j=j, output=out[0], output_random=min(out[1], 1.0), input=into[0], input_random=min(into[1], 1.0)
    )


def _leading(dense: Tensor, count: int, *, fewer: bool = False) -> Triplets | None:
    """Runs `leading` on a matrix in memory."""
    return leading(lambda x: dense @ x, lambda y: dense.mT @ y, dense[0], dense.shape[1], count, fewer=fewer)


def leading_of(piece: Piece, count: int) -> Triplets | None:
    """The leading singular triplets of a change."""
    if isinstance(piece, LowRank):
        whole = singular(piece)
    elif min(piece.shape) <= EXACT_SIDE:
        u, s, vh = torch.linalg.svd(piece, full_matrices=False)
        whole = Triplets(u, s, vh.mT)
    else:
        return _leading(piece.float(), count)
    return Triplets(whole.left[:, :count], whole.values[:count], whole.right[:, :count])
