"""The difference of one block's W' between two inputs, split into what moved: routing, scale, and both together.

With W' = Σ_h Ĥ_h ⊗ A_hᵀ, Ĥ = H ∘ S and S_h[i, j] = t_i s_h[j] (Eq. 10 of Wang & Li; A does not depend on the input),

    Ĥ_b - Ĥ_a  =  (H_b - H_a) ∘ S_a  +  H_a ∘ (S_b - S_a)  +  (H_b - H_a) ∘ (S_b - S_a)
                       routing              scale                  interaction

on tokens that both inputs have. Every part is computed from differences, so a small change is no difference of large
numbers. Norms follow from K[h, k] = ⟨left_h, left_k⟩ of each part and the Gram matrix G[h, k] = ⟨A_h, A_k⟩.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duat_cli.operators.kronecker import frobenius_norm
from duat_cli.operators.uniform import uniform_rows

ELEMENTS = 1 << 20  # elements of Ĥ processed at once
PARTS = ("relative", "routing", "scale", "interaction")


@dataclass(frozen=True)
class Routed:
    """Ĥ of one block on one input, by its factors: Ĥ_h[i, j] = t_i H_h[i, j] s_h[j]."""

    attention: Tensor  # H, (heads, N, N); of cross-attention (heads, N, K), N tokens reading K of the encoder
    source: Tensor  # s, (heads, N) or (heads, K)
    token: Tensor  # t, (N,) or (1,); with a gate, which is a factor of it, (heads, N)
    offsets: tuple[int, ...] = (0,)  # of values made of several tokens: `attention` holds H S_k of all heads per offset
    channels: bool = False  # whether every head here is one channel of a head, with its own gate

    @property
    def tokens(self) -> int:
        return self.attention.shape[-2]

    @property
    def sources(self) -> int:
        """How many tokens are read."""
        return self.attention.shape[-1]

    def uniform(self, seen: Tensor) -> Routed:
        """These scales and gates with H uniform over the positions that a row sees. seen: (N, N) or (N, K), bool."""
        level = uniform_rows(seen, len(self.attention), self.attention.dtype, self.offsets)
        return replace(self, attention=level)

    def piece(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(H, S) of some rows and columns, each (heads, rows, columns), float64."""
        H = self.attention[:, rows[:, None], columns].double()
        token = self.token.expand(*self.token.shape[:-1], self.tokens)[..., rows].double()
        return H, token[..., None] * self.source[:, None, columns].double()


@dataclass(frozen=True)
class Change:
    """Norms relative to that of W'_a on the same tokens, by the names in `PARTS`; None where that norm is zero."""

    whole: dict[str, float] | None
    heads: list[dict[str, float] | None]  # for Ĥ_h ⊗ A_hᵀ of each head


def change(
    before: Routed,
    after: Routed,
    aligned: tuple[Tensor, Tensor],
    G: Tensor,
    sources: tuple[Tensor, Tensor] | None = None,
) -> Change:
    """The change from input a to input b on aligned tokens. aligned: their places in a and in b, (n,) each; sources:
    those of the tokens that they read, (m,) each, where these are others."""
    a, b = (places.to(G.device) for places in aligned)
    read_a, read_b = (a, b) if sources is None else (places.to(G.device) for places in sources)
    rows = {name: torch.zeros_like(G) for name in ("base", *PARTS)}
    for some in _chunks(len(a), len(G), len(read_a)):
        H_a, S_a = before.piece(a[some], read_a)
        H_b, S_b = after.piece(b[some], read_b)
        moved, scaled = H_b - H_a, S_b - S_a
        lefts = {"base": H_a * S_a, "routing": moved * S_a, "scale": H_a * scaled, "interaction": moved * scaled}
        lefts["relative"] = lefts["routing"] + lefts["scale"] + lefts["interaction"]
        for name, left in lefts.items():
            rows[name] += _products(left)
    whole = _relative({name: frobenius_norm(K, G) for name, K in rows.items()})
    alone = {name: K.diagonal().clamp_min(0).sqrt().tolist() for name, K in rows.items()}
    heads = [_relative({name: sizes[h] for name, sizes in alone.items()}) for h in range(len(G))]
    return Change(whole, heads)


def share_from(one: Routed, rows: Tensor, columns: Tensor, G: Tensor) -> tuple[float | None, list[float | None]]:
    """The share of some columns in some rows of W', Σ ‖B_ij‖² over these columns / Σ over all j, and by head.

    rows, columns: places of tokens, (n,) and (m,). None where these rows of W' are zero.
    """
    every = torch.arange(one.sources, device=G.device)
    inside, total = torch.zeros_like(G), torch.zeros_like(G)
    for some in _chunks(len(rows), len(G), one.sources):
        here = rows.to(G.device)[some]
        H, S = one.piece(here, every)
        left = H * S
        total += _products(left)
        inside += _products(left[..., columns.to(G.device)])
    whole = _share(float((inside * G).sum()), float((total * G).sum()))
    heads = zip(inside.diagonal().tolist(), total.diagonal().tolist(), strict=True)
    return whole, [_share(part, all_of_it) for part, all_of_it in heads]


def _share(part: float, whole: float) -> float | None:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else None


def _chunks(rows: int, heads: int, columns: int) -> list[slice]:
    step = max(1, ELEMENTS // max(1, heads * columns))
    return [slice(first, first + step) for first in range(0, rows, step)]


def _products(left: Tensor) -> Tensor:
    """K[h, k] = ⟨left_h, left_k⟩, (heads, heads)."""
    flat = left.flatten(1)
    return flat @ flat.T


def _relative(norms: dict[str, float]) -> dict[str, float] | None:
    base = norms.pop("base")
    return {name: norm / base for name, norm in norms.items()} if base else None
