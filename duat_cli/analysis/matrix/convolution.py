"""A 1-D convolution over the same tokens, to compare with attention (Wang & Li, appendix C, Fig. 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from duat_cli.analysis.matrix import case as matrix_case
from duat_cli.analysis.matrix.case import Case
from duat_cli.models.arrays import gaussian
from duat_cli.operators import paper
from duat_cli.results.matrix import Convolution, MatrixForm

WIDTH = 3  # k, odd: equally many tokens on both sides, zeros beyond the ends
SEED = 13
_CHUNKS = (
    '"1D convolution learns by processing encoded text in chunks based on the size of the convolution kernel" (DUAT, '
    "appendix C); its kernel stays the same for every input, H does not"
)


def kernel(case: Case) -> Tensor:
    """Random weights of a convolution from M to M channels, without zeros, (M, M, k)."""
    width = case.width
    drawn = gaussian((width, width, WIDTH), case.X, SEED)
    return drawn / (WIDTH * width) ** 0.5


def built(case: Case) -> Tensor | None:
    """W'_conv, (N·M, N·M); None where it is too large."""
    if case.tokens * case.width > matrix_case.DENSE_SIDE:
        return None
    return paper.conv1d_matrix(kernel(case), case.tokens)


def by_torch(case: Case) -> Tensor:
    """Output of torch's convolution of X, (N, M); in float64, since a GPU drops digits in float32."""
    with torch.no_grad():
        made = nn.functional.conv1d(case.X.double().T[None], kernel(case).double(), padding=WIDTH // 2)
    return made[0].T.to(case.X.dtype)


def convolution_form(case: Case, matrix: Tensor | None) -> MatrixForm:
    """Size and density of W'_conv."""
    tokens = case.tokens
    expected = WIDTH / tokens - (WIDTH**2 - 1) / (4 * tokens**2)
    return MatrixForm(
        name="W'_conv",
        formula=f"sum_w S_w (x) K_w, 1-D convolution, k = {WIDTH}",
        shape=[tokens * case.width] * 2,
        built=matrix is not None,
        density=_reach(tokens).double().mean().item() if matrix is None else paper.density(matrix),
        expected_density=expected,
        expected_formula="k/N - (k^2-1)/4N^2",
        papers=_CHUNKS,
    )


def convolution(case: Case, shown: int) -> Convolution:
    """How many tokens an output token reads, compared with attention; and C of the first `shown` tokens."""
    norms = torch.linalg.vector_norm(kernel(case).double(), dim=(0, 1))  # norm of each K_w
    offset = torch.arange(case.tokens)[None, :] - torch.arange(case.tokens)[:, None] + WIDTH // 2  # w from j to i
    coupling = torch.where(_reach(case.tokens), norms.cpu()[offset.clamp(0, WIDTH - 1)], 0.0)
    return Convolution(
        width=WIDTH,
        coupling=coupling[:shown, :shown].tolist(),
        tokens_read=float(_reach(case.tokens).double().sum(dim=1).mean()),
        attention_tokens_read=float((case.left != 0).any(dim=0).double().sum(dim=1).mean()),
    )


def _reach(tokens: int) -> Tensor:
    """Which tokens j each output token i reads, (N, N) bool."""
    places = torch.arange(tokens)
    return (places[:, None] - places[None, :]).abs() <= WIDTH // 2
