"""The steps of the paper from attention to one matrix (Eq. 5-10), each checked on the numbers of a real block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from duat_cli.analysis.matrix import case as matrix_case
from duat_cli.analysis.matrix import convolution
from duat_cli.analysis.matrix.case import Case, Dense
from duat_cli.analysis.matrix.forms import SHOWN_TOKENS, coupling
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.operators import paper
from duat_cli.results.base import finite
from duat_cli.results.matrix import MatrixCheck

Sides = tuple[Tensor, Tensor]
"""The two sides that a statement says are equal."""


@dataclass(frozen=True)
class _Statement:
    name: str
    text: str
    sides: Callable[[Case, Dense | None], Sides | str]  # a string is the reason why it cannot be checked
    against_model: bool  # whether one side comes from the model's own arithmetic, with its rounding
    outgrown: Callable[[Case], float] | None = None  # how much larger the terms of the sides are than their sum


ROUNDED = 4  # machine epsilons of the terms that may be left where they cancel
CANCELLED = "the heads cancel each other: what is left on both sides is rounding"
SUMMED = "its values are made of several tokens: each head stands here once for each, in the model only their sum"


def checks(case: Case, dense: Dense | None) -> list[MatrixCheck]:
    return [_check(statement, case, dense) for statement in _STATEMENTS]


def _check(statement: _Statement, case: Case, dense: Dense | None) -> MatrixCheck:
    sides = statement.sides(case, dense)
    dtype = case.dtype if statement.against_model else case.X.dtype
    tolerance = tolerance_for(dtype)
    if not isinstance(sides, str) and statement.outgrown is not None and relative_error(*sides) > tolerance:
        tolerance = max(tolerance, ROUNDED * torch.finfo(dtype).eps * statement.outgrown(case))
        sides, tolerance = (sides, tolerance) if tolerance < 1 else (CANCELLED, tolerance_for(dtype))
    known = {"name": statement.name, "statement": statement.text, "tolerance": tolerance}
    if isinstance(sides, str):
        return MatrixCheck.absent(sides, **known)
    error = relative_error(*sides)
    return MatrixCheck.explained(
        "the right side is zero and the left is not, or a value is not finite",
        relative_error=finite(error),
        holds=error <= tolerance,
        **known,
    )


def _of_image(case: Case) -> float:
    """Ratio of the heads' contributions to W' x: the root of their summed squares over |W' x|."""
    heads = zip(case.left, case.value, case.output, strict=True)
    squares = [float((H @ (case.X @ value) @ output).square().sum()) for H, value, output in heads]
    return _ratio(sum(squares), float(case.operator.apply(case.X).square().sum()))


def _of_operator(case: Case) -> float:
    """Ratio of the Kronecker products of W' to W', in Frobenius norms."""
    rows = case.left.flatten(1).double()
    squares = (rows @ rows.mT) * case.gram
    return _ratio(float(squares.trace()), float(squares.sum()))


def _of_maps(case: Case) -> float:
    """Ratio of all maps V O to their sum, in Frobenius norms."""
    return _ratio(float(case.gram.trace()), float(case.gram.sum()))


def _ratio(terms: float, whole: float) -> float:
    return (terms / whole) ** 0.5 if whole > 0 else inf if terms > 0 else 1.0


def _contribution_sides(case: Case, dense: Dense | None) -> Sides:
    """W'_HVO x', and what the model's own attention adds."""
    if dense is None:
        return case.operator.apply(case.X), case.contribution
    return dense.W_HVO @ paper.vectorise(case.X), paper.vectorise(case.contribution)


def _heads_sides(case: Case, dense: Dense | None) -> Sides | str:
    """W'_HV x', and the model's own concatenated heads."""
    if case.mixed.shape[1] != len(case.left):
        return SUMMED
    if dense is None:
        return (case.left @ (case.X @ case.value)).transpose(0, 1), case.mixed
    return dense.W_HV @ paper.vectorise(case.X), paper.vectorise(case.mixed)


def _projection_sides(case: Case, dense: Dense | None) -> Sides | str:
    """W'_O times the model's own heads, and what its attention adds; I_N ⊗ W is the output projection."""
    if case.mixed.shape[1] != len(case.left):
        return SUMMED
    heads = paper.vectorise(case.mixed)  # (N·heads·d,)
    if dense is None:
        return heads.reshape(case.tokens, -1) @ case.projection.mT, case.contribution
    return dense.W_O @ heads, paper.vectorise(case.contribution)


def _product_sides(case: Case, dense: Dense | None) -> Sides | str:
    if dense is None:
        return _too_large(case)
    return dense.W_O @ dense.W_HV, dense.W_HVO


def _coupling_sides(case: Case, dense: Dense | None) -> Sides | str:
    """The closed form of C, and the norms of the blocks of the dense matrix."""
    if dense is None:
        return _too_large(case)
    blocks = dense.W_HVO.reshape(case.tokens, case.width, case.tokens, case.width)
    norms = torch.linalg.vector_norm(blocks, dim=(1, 3), dtype=torch.float64)
    return coupling(case, SHOWN_TOKENS), norms[:SHOWN_TOKENS, :SHOWN_TOKENS]


def _orientation_sides(case: Case, dense: Dense | None) -> Sides | str:
    """(W ⊗ I_c) vec(Z), and vec(W Z), with Z, (heads·d, c), the first c columns of the model's stacked W_V.

    With c = M this is W ⊗ I_M; c is as large as can be built.
    """
    columns = min(case.width, matrix_case.DENSE_SIDE // max(case.width, case.inner))
    if columns == 0:
        return f"W (x) I_c has {max(case.width, case.inner)} rows for each column; built up to {matrix_case.DENSE_SIDE}"
    W = case.projection
    Z = case.value.mT.flatten(0, 1)[:, :columns]
    return paper.linear_matrix_left(W, columns) @ paper.vectorise(Z), paper.vectorise(W @ Z)


def _diamond_left_sides(case: Case, dense: Dense | None) -> Sides:
    """W1 ⋄ [x ⋄ W2], and (W2 W1) ⋄ x, with W2 = W_V,0, W1 = W_O,0 and the tokens as columns of x, (M, N)."""
    W2, W1, x = case.value[0], case.output[0], case.X.mT
    return paper.diamond(W1, paper.diamond_right(x, W2)), paper.diamond(W2 @ W1, x)


def _diamond_right_sides(case: Case, dense: Dense | None) -> Sides:
    """[W1 ⋄ x] ⋄ W2, and (W1 W2) ⋄ x, with W1 = W_V,0, W2 = W_O,0 and the tokens as columns of x, (M, N)."""
    W1, W2, x = case.value[0], case.output[0], case.X.mT
    return paper.diamond_right(paper.diamond(W1, x), W2), paper.diamond(W1 @ W2, x)


def _convolution_sides(case: Case, dense: Dense | None) -> Sides | str:
    """W'_conv x', and the output of torch's convolution."""
    matrix = convolution.built(case)
    if matrix is None:
        return _too_large(case)
    return matrix @ paper.vectorise(case.X), paper.vectorise(convolution.by_torch(case))


def _too_large(case: Case) -> str:
    return (
        f"W' is not built: its longest side N max(M, heads d) = {case.side} is over {matrix_case.DENSE_SIDE}; "
        "fewer tokens (--max-tokens) make it smaller"
    )


_STATEMENTS = (
    _Statement("contribution", "W'_HVO x' = what the model's attention adds", _contribution_sides, True, _of_image),
    _Statement("heads", "W'_HV x' = the model's concatenated heads", _heads_sides, True),
    _Statement("projection", "W'_O heads = what the model's attention adds", _projection_sides, True, _of_image),
    _Statement("product", "W'_O W'_HV = W'_HVO", _product_sides, False, _of_operator),
    _Statement("coupling", "C_ij = |B_ij|_F of W'_HVO", _coupling_sides, False, _of_operator),
    _Statement("convolution", "W'_conv x' = torch's conv1d of X", _convolution_sides, False),
    _Statement("orientation", "(W (x) I_c) vec(Z) = vec(W Z), Z from W_V", _orientation_sides, False, _of_maps),
    _Statement("diamond_left", "W1 <> [x <> W2] = (W2 W1) <> x", _diamond_left_sides, False),
    _Statement("diamond_right", "[W1 <> x] <> W2 = (W1 W2) <> x", _diamond_right_sides, False),
)
