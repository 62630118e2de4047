"""Closed forms against W' written out."""

from __future__ import annotations

from benchmarks.common import Row, median_seconds, seconds


def dense(runs: int) -> list[Row]:
    """Frobenius norm, C, Kronecker spectrum and block correlation, both ways, at N = 32, M = 384, 12 heads."""
    import torch

    from duat_cli.operators.coupling import OperatorSums
    from duat_cli.operators.kronecker import HeadFactors, KroneckerSum, frobenius_norm, gram, gram_root
    from duat_cli.operators.kronecker import kronecker_spectrum as spectrum

    torch.manual_seed(0)
    tokens, width, heads = 32, 384, 12
    factors = HeadFactors(torch.randn(heads, width, 32) / width**0.5, torch.randn(heads, 32, width) / 32**0.5)
    attention = torch.softmax(2 * torch.randn(heads, tokens, tokens), dim=-1)
    G = gram(factors)
    root = gram_root(G)
    found: dict[str, tuple[float, ...]] = {}

    def closed() -> None:
        sums = OperatorSums(root)
        squares, _ = sums.add(attention)
        K = sums.head_products
        found["closed"] = (frobenius_norm(K, G), float(squares.sum()), float(spectrum(K, root)[0]),
                           sums.block_correlations()[0] or 0.0)  # fmt: skip

    def written_out() -> None:
        W = KroneckerSum(attention, factors).dense(limit=tokens * width)
        blocks = W.reshape(tokens, width, tokens, width).transpose(1, 2).reshape(tokens * tokens, -1)
        norms = torch.linalg.vector_norm(blocks, dim=1).double()
        cosines = (blocks @ blocks.T).double() / norms[:, None] / norms
        values = torch.linalg.svdvals(blocks)
        found["dense"] = (float(norms.square().sum().sqrt()), float(norms.square().sum()), float(values[0]),
                          float(cosines.square().mean().sqrt()))  # fmt: skip

    slow, fast = seconds(written_out), median_seconds(closed, 20 * runs)
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["closed"], found["dense"], strict=True))
    small = attention.numel() * attention.element_size() + G.numel() * G.element_size()
    return [
        Row("W' written out: build, norms, spectrum, correlation", slow, "s"),
        Row("the same numbers in closed form", fast * 1e3, "ms"),
        Row("times faster", slow / fast, "x", ">= 10000"),
        Row("times smaller (W' against H and G)", 4 * (tokens * width) ** 2 / small, "x", ">= 10000"),
        Row("largest relative difference of the numbers (dense is float32)", worst, ""),
    ]
