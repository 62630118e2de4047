"""The paper's explicit matrices, for cases that are small enough to check every step of W' by hand.

Wang & Li, "Dynamic Universal Approximation Theory" (arXiv 2407.00958, Eq. 5-10; the convolution comes from
its sister on vision, arXiv 2407.17480). A layer f(X; W) becomes a product x' -> W' x' by two rearrangements:

    T_D  the input becomes a vector:       x' = vec(X)             `vectorise`
    T_P  the parameters become a matrix:   vec(f(X; W)) = W' x'    `linear_matrix`, `conv1d_matrix`, ...

X is N×M, one token a row, and vec is row-major, so that vec(H X A) = (H ⊗ Aᵀ) vec(X). Entry (i, a) of X
stands at place i·M + a of x'. A bias is added to the product and stays outside W'.

The paper's Eq. 9 applies transposes, (W'_HVO)ᵀ x', with W'_HVO = W'_O W'_HV; the caption of Fig. 1 in its appendix
has W'_HV x'. Here every W' is what is applied to x', so that W'_HVO = W'_O W'_HV holds, and W'_HVO is the W' of Eq. 10.

These matrices have (NM)² entries; the closed forms of the other files here never build them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from duat_cli.errors import InputError

# The diamond product


def diamond(W: Tensor, x: Tensor) -> Tensor:
    """W ⋄ x = Wᵀ x.  W (in, out), x (in,) or (in, k): k vectors as columns; gives (out,) or (out, k)."""
    return W.mT @ x


def diamond_right(x: Tensor, W: Tensor) -> Tensor:
    """x ⋄ W = Wᵀ x: the parameter is transposed, on either side of ⋄.

    Given W ⋄ x = Wᵀx, the first rule leaves no other meaning, and both become theorems:

        W1 ⋄ [x ⋄ W2] = W1ᵀ W2ᵀ x = (W2 W1) ⋄ x
        [W1 ⋄ x] ⋄ W2 = W2ᵀ W1ᵀ x = (W1 W2) ⋄ x

    The parameter that acts first stands first in the product. The papers print them more loosely;
    with the factors swapped, or with x ⋄ W read as the row xᵀW inside W1 ⋄ [...], the sides differ.
    For one token x the row x W of a transformer layer has the same entries.
    """
    return diamond(W, x)


# T_D: the input as a vector


def vectorise(X: Tensor) -> Tensor:
    """x' = T_D(X) = vec(X), row-major: x'[i·M + a] = X[i, a].  X (N, M); gives (NM,)."""
    return X.reshape(-1)


# T_P: the parameters as a matrix


def linear_matrix(W: Tensor, tokens: int) -> Tensor:
    """W' = I_N ⊗ W for y_j = W x_j, that is Y = X Wᵀ: torch's linear layer without its bias.

    W (out, in); gives (N·out, N·in). Density 1/N when W has no zeros: tokens do not mix.
    """
    return _kronecker(_identity(tokens, W), W)


def linear_matrix_left(W: Tensor, columns: int) -> Tensor:
    """W' = W ⊗ I_M for Y = W X: the paper's orientation, where W acts from the left and mixes the rows.

    W (out, N); gives (out·M, N·M) with M = `columns`. Density 1/M when W has no zeros.
    """
    return _kronecker(W, _identity(columns, W))


def conv1d_matrix(kernel: Tensor, tokens: int) -> Tensor:
    """W' = Σ_w S_w ⊗ K_w: a convolution over the tokens, as attention with k heads whose H are shifts.

    K_w = kernel[:, :, w] and S_w[i, j] = 1 where j = i + w - (k-1)/2, k odd: as many tokens on both sides, zeros beyond
    the ends. Same numbers as torch's conv1d (a cross-correlation), but X stays (N, in), one token a row, where torch
    takes its transpose.

    kernel (out, in, k); gives (N·out, N·in). Density k/N - (k²-1)/(4N²) for (k-1)/2 <= N: the edges lose some.
    """
    width = kernel.shape[-1]
    shifts = [_shift(tokens, w - width // 2, kernel) for w in range(width)]
    return _kronecker_sum(torch.stack(shifts), kernel.permute(2, 0, 1))


def attention_value_matrix(H: Tensor, W_V: Tensor) -> Tensor:
    """W'_HV: the heads' H_h ⊗ W_V,hᵀ stacked, x' -> vec of the concatenated heads (Eq. 5-10).

    transformers concatenates the heads inside each token: the output is vec of an N × (heads·d) matrix, with
    head h's entry b of token i at place (i·heads + h)·d + b. The rows are in that order, token before head:

        W'_HV[(i, h, b), (j, a)] = H[h, i, j] W_V[h, a, b]

    Stacking the blocks whole, head before token, gives the same rows in another order. The papers divide x into
    x_1, ..., x_h (DUAT, below Eq. 8), so that their W'_HV is zero outside 1/h of its entries; transformers' heads read
    all of x.

    H (heads, N, N), W_V (heads, M, d); gives (N·heads·d, N·M).
    """
    _require_heads(H, W_V)
    heads, tokens, _ = H.shape
    _, hidden, d = W_V.shape
    rows, columns = tokens * heads * d, tokens * hidden
    return torch.einsum("hij,hab->ihbja", H, W_V).reshape(rows, columns)


def attention_output_matrix(W_O: Tensor, tokens: int) -> Tensor:
    """W'_O = I_N ⊗ W_Oᵀ, where W_O (h·d, M) has the heads' rows one under another (Eq. 5-10).

    W_O (heads, d, M); gives (N·M, N·heads·d). Its columns are in the row order of `attention_value_matrix`.
    """
    return linear_matrix(W_O.flatten(0, 1).mT, tokens)


def attention_matrix(H: Tensor, W_V: Tensor, W_O: Tensor) -> Tensor:
    """W'_HVO = W'_O W'_HV = Σ_h H_h ⊗ (W_V,h W_O,h)ᵀ: all of multi-head attention, H frozen (Eq. 5-10).

    H (heads, N, N), W_V (heads, M, d), W_O (heads, d, M); gives (N·M, N·M). A causal H limits its density
    to (N+1)/2N.
    """
    _require_heads(H, W_V, W_O)
    return _kronecker_sum(H, (W_V @ W_O).mT)


def density(matrix: Tensor) -> float:
    """Share of the entries that are not zero, exactly zero: no threshold.  Any shape with an entry."""
    if matrix.numel() == 0:
        raise InputError(f"density: a matrix of shape {tuple(matrix.shape)} has no entries to count")
    return int(torch.count_nonzero(matrix)) / matrix.numel()


# Parts


def _kronecker(left: Tensor, right: Tensor) -> Tensor:
    """L ⊗ R. torch.kron (2.13) refuses views such as a transpose.  left (I, J), right (B, A)."""
    return _kronecker_sum(left[None], right[None])


def _kronecker_sum(left: Tensor, right: Tensor) -> Tensor:
    """Σ_k L_k ⊗ R_k, entry ((i, b), (j, a)) = Σ_k L_k[i, j] R_k[b, a].  left (k, I, J), right (k, B, A)."""
    rows, columns = left.shape[1] * right.shape[1], left.shape[2] * right.shape[2]
    return torch.einsum("kij,kba->ibja", left, right).reshape(rows, columns)


def _shift(side: int, offset: int, like: Tensor) -> Tensor:
    """S[i, j] = 1 where j = i + offset, else 0; a row may stay zero.  (side, side)."""
    place = torch.arange(side, device=like.device)
    return (place[:, None] + offset == place).to(like.dtype)


def _identity(side: int, like: Tensor) -> Tensor:
    """I in the dtype and on the device of `like`.  (side, side)."""
    return torch.eye(side, dtype=like.dtype, device=like.device)


def _require_heads(H: Tensor, W_V: Tensor, W_O: Tensor | None = None) -> None:
    """H (heads, N, N), W_V (heads, M, d), W_O (heads, d, M): einsum would stretch one head over many."""
    heads, tokens, hidden, d = H.shape[0], H.shape[1], *W_V.shape[1:]
    expected = {"H": (heads, tokens, tokens), "W_V": (heads, hidden, d), "W_O": (heads, d, hidden)}
    for name, tensor in (("H", H), ("W_V", W_V), ("W_O", W_O)):
        if tensor is not None and tuple(tensor.shape) != expected[name]:
            raise InputError(
                f"{name}: expected shape {expected[name]} beside H {tuple(H.shape)} and "
                f"W_V {tuple(W_V.shape)}, got {tuple(tensor.shape)}; repeat shared heads first"
            )
