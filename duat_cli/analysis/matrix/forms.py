"""The explicit matrices of `duat matrix`, one by one: size, density, and the corner that is shown."""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.analysis.matrix.case import Case, Dense
from duat_cli.analysis.matrix.convolution import built, convolution_form
from duat_cli.operators import paper
from duat_cli.results.matrix import MatrixForm

SHOWN_TOKENS = 8
CORNER = 6  # rows and columns of B_00 that are shown
# Quoted from Wang & Li. DUAT: "Dynamic Universal Approximation Theory: the basic theory for Transformer-based large
# language models"; UAT: "Universal Approximation Theory: The basic theory for large language models".
_SLICED = (
    'the input "is divided into x_1, ..., x_h based on h" (DUAT, below Eq. 8): there a head reads 1/h of each token, '
    "so W'_HV has density 1/h = {share} % before a mask; here every head reads all of x"
)
_DENSE = (
    '"a dense matrix (almost devoid of zero elements and whose internal elements are highly correlated)" (DUAT, '
    "section 4.2): no causal mask is meant there"
)
_LINEAR = '"the sparsity of the parameter matrix corresponding to the Linear operation is 1/M" (UAT, appendix B.1)'
_UNSTATED = "the papers state no density of W'_O; their 1/M of a linear layer belongs to W (x) I_M"


def forms(case: Case, dense: Dense | None) -> list[MatrixForm]:
    """The forms: T_D(x) = x', the two parts of attention's W' and W' itself, a convolution, and a linear layer."""
    rows, hidden = case.tokens * case.width, case.tokens * case.inner
    expected, formula = _mask_density(case)
    filled = paper.density(case.projection)
    return [
        MatrixForm.absent("x' is a vector", name="x'", formula="T_D(X) = vec(X)", shape=[rows], built=True),
        MatrixForm(
            name="W'_HV",
            formula="(H_h S) (x) V_h^T, token before head",
            shape=[hidden, rows],
            built=dense is not None,
            density=paper.density(dense.W_HV) if dense else _value_density(case),
            expected_density=expected,
            expected_formula=formula,
            papers=_SLICED.format(share=f"{100 / len(case.left):.3g}"),
        ),
        MatrixForm.explained(
            _UNSTATED,
            name="W'_O",
            formula="I_N (x) W, W the output projection",
            shape=[rows, hidden],
            built=dense is not None,
            density=paper.density(dense.W_O) if dense else filled / case.tokens,
            expected_density=1 / case.tokens,
            expected_formula="1/N",
            papers=None,
        ),
        MatrixForm(
            name="W'_HVO",
            formula="sum_h (H_h S) (x) (V_h O_h)^T",
            shape=[rows, rows],
            built=dense is not None,
            density=paper.density(dense.W_HVO) if dense else _operator_density(case),
            expected_density=expected,
            expected_formula=formula,
            papers=_DENSE,
        ),
        convolution_form(case, built(case)),
        MatrixForm(
            name="W (x) I_M",
            formula="W_O from the left, as the paper has its linear layers",
            shape=[case.width**2, case.inner * case.width],
            built=False,
            density=filled / case.width,
            expected_density=1 / case.width,
            expected_formula="1/M",
            papers=_LINEAR,
        ),
    ]


def _mask_density(case: Case) -> tuple[float, str]:
    """Density that the mask alone gives, and its formula: causal if no token reads a later one."""
    N = case.tokens
    if N == 1:
        return 1.0, "1, one token"
    return (1.0, "1, no causal mask") if bool(case.left.triu(1).any()) else ((N + 1) / (2 * N), "(N+1)/2N, causal")


def _value_density(case: Case) -> float:
    """Density of W'_HV, Σ_h nonzeros(Ĥ_h) nonzeros(W_V,h) over its number of entries, as no entry is a sum."""
    filled = (case.left != 0).sum((1, 2)).double() @ (case.value != 0).sum((1, 2)).double()
    return float(filled) / (case.tokens * case.inner * case.tokens * case.width)


def _operator_density(case: Case) -> float:
    """Density of W'_HVO: the mean over its blocks of the share of entries that can be nonzero."""
    return case.pattern.filled(case.left.abs().flatten(1)) / case.tokens**2


def corner(case: Case) -> Tensor:
    """The first entries of B_00 = (Σ_h Ĥ_h[0, 0] V_h O_h)ᵀ, (<= CORNER, <= CORNER)."""
    first = case.left[:, 0, 0]
    return torch.einsum("h,had,hdb->ba", first, case.value[:, :CORNER], case.output[:, :, :CORNER])


def coupling(case: Case, tokens: int) -> Tensor:
    """C[i, j] = sqrt(ĥ_ijᵀ G ĥ_ij) between the first `tokens` tokens, (<= tokens, <= tokens), row by row."""
    rows = case.left[:, :tokens, :tokens].unbind(1)  # each (heads, tokens)
    squares = [torch.einsum("hj,hk,kj->j", h, case.gram, h) for h in (row.double() for row in rows)]
    return torch.stack(squares).clamp_min(0).sqrt()
