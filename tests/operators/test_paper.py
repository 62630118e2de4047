"""Each explicit matrix against the operation itself, in float64; the densities against the paper's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from duat_cli.errors import InputError
from duat_cli.operators import paper

few = settings(max_examples=15, deadline=None)
size = st.integers(1, 4)
seeds = st.integers(0, 2**16)


def normal(seed: int, *shape: int) -> Tensor:
    """Independent normal entries, float64; no entry is zero."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention_parts(seed: int, heads: int, tokens: int, hidden: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """H (heads, N, N) causal with rows that sum to 1, W_V (heads, M, d), W_O (heads, d, M)."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = normal(seed, heads, tokens, tokens).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1), normal(seed + 1, heads, hidden, d), normal(seed + 2, heads, d, hidden)


def concatenated_heads(H: Tensor, W_V: Tensor, X: Tensor) -> Tensor:
    """As transformers writes it: (heads, N, d) -> transpose -> reshape.  (N, heads·d)."""
    return (H @ (X @ W_V)).transpose(0, 1).reshape(X.shape[0], -1)


# The diamond product


def test_diamond_is_the_transposed_product() -> None:
    W = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    x = torch.tensor([10.0, 100.0], dtype=torch.float64)
    expected = torch.tensor([410.0, 520.0, 630.0], dtype=torch.float64)
    torch.testing.assert_close(paper.diamond(W, x), expected)
    torch.testing.assert_close(paper.diamond_right(x, W), expected)
    torch.testing.assert_close(paper.diamond_right(x, W), x @ W)  # one token as a row


@few
@given(seeds, size, size, size, size)
def test_diamond_rules(seed: int, a: int, b: int, c: int, k: int) -> None:
    first, second, x = normal(seed, a, b), normal(seed + 1, b, c), normal(seed + 2, a, k)
    chained = paper.diamond(first @ second, x)
    torch.testing.assert_close(paper.diamond(second, paper.diamond_right(x, first)), chained)
    torch.testing.assert_close(paper.diamond_right(paper.diamond(first, x), second), chained)


def test_diamond_rules_depend_on_the_order() -> None:
    W1, W2, x = normal(0, 3, 3), normal(1, 3, 3), normal(2, 3)
    nested = paper.diamond(W1, paper.diamond_right(x, W2))
    torch.testing.assert_close(nested, paper.diamond(W2 @ W1, x))
    assert (nested - paper.diamond(W1 @ W2, x)).norm() > 0.1 * nested.norm()


@few
@given(seeds, size, size, size, size)
def test_a_product_from_both_sides_is_a_diamond_of_rearranged_parameters(
    seed: int, rows: int, tokens: int, hidden: int, out: int
) -> None:
    left, right = normal(seed, rows, tokens), normal(seed + 1, hidden, out)
    X = normal(seed + 2, tokens, hidden)
    W2 = paper.linear_matrix(right.mT, tokens).mT  # x' ⋄ W2 = vec(X right)
    W1 = paper.linear_matrix_left(left, out).mT  # W1 ⋄ y' = vec(left Y)
    torch.testing.assert_close(paper.diamond(W2 @ W1, paper.vectorise(X)), paper.vectorise(left @ X @ right))


# T_D


def test_vectorise_is_row_major() -> None:
    X = torch.arange(6).reshape(2, 3)
    assert paper.vectorise(X).tolist() == [0, 1, 2, 3, 4, 5]
    assert paper.vectorise(X.mT).tolist() == [0, 3, 1, 4, 2, 5]


# T_P: linear layers


@few
@given(seeds, size, size, size)
def test_linear_matrix_is_the_linear_layer(seed: int, tokens: int, inner: int, out: int) -> None:
    W, X, bias = normal(seed, out, inner), normal(seed + 1, tokens, inner), normal(seed + 2, out)
    y = paper.linear_matrix(W, tokens) @ paper.vectorise(X) + bias.repeat(tokens)
    torch.testing.assert_close(y.reshape(tokens, -1), functional.linear(X, W, bias))


@few
@given(seeds, size, size, size)
def test_linear_matrix_left_is_the_left_product(seed: int, out: int, tokens: int, columns: int) -> None:
    W, X = normal(seed, out, tokens), normal(seed + 1, tokens, columns)
    y = paper.linear_matrix_left(W, columns) @ paper.vectorise(X)
    torch.testing.assert_close(y.reshape(out, -1), W @ X)


@few
@given(seeds, size, size, size)
def test_linear_densities_are_1_over_n_and_1_over_m(seed: int, count: int, a: int, b: int) -> None:
    W = normal(seed, a, b)
    assert paper.density(paper.linear_matrix(W, count)) == pytest.approx(1 / count)
    assert paper.density(paper.linear_matrix_left(W, count)) == pytest.approx(1 / count)


# T_P: convolution


@few
@given(seeds, size, size, st.sampled_from([1, 3, 5]))
def test_conv1d_matrix_is_conv1d(seed: int, inner: int, out: int, width: int) -> None:
    tokens = 7
    kernel, X = normal(seed, out, inner, width), normal(seed + 1, tokens, inner)
    matrix = paper.conv1d_matrix(kernel, tokens)
    expected = functional.conv1d(X.mT, kernel, padding=width // 2).mT
    assert matrix.shape == (expected.numel(), X.numel())
    torch.testing.assert_close((matrix @ paper.vectorise(X)).reshape(len(expected), -1), expected)


def test_conv1d_of_width_one_is_the_linear_layer() -> None:
    W = normal(0, 3, 2)
    assert torch.equal(paper.conv1d_matrix(W[:, :, None], 4), paper.linear_matrix(W, 4))


@pytest.mark.parametrize("tokens", [3, 5, 9])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_conv1d_density(tokens: int, width: int) -> None:
    matrix = paper.conv1d_matrix(normal(0, 3, 2, width), tokens)
    assert matrix.shape == (3 * tokens, 2 * tokens)
    assert paper.density(matrix) == pytest.approx(width / tokens - (width**2 - 1) / (4 * tokens**2))


# T_P: attention


@few
@given(seeds, size, size, size, size)
def test_attention_matrices_are_the_three_steps_of_attention(
    seed: int, heads: int, tokens: int, hidden: int, d: int
) -> None:
    H, W_V, W_O = attention_parts(seed, heads, tokens, hidden, d)
    X = normal(seed + 3, tokens, hidden)
    concatenated = concatenated_heads(H, W_V, X)  # (N, heads·d)
    output = concatenated @ W_O.reshape(heads * d, hidden)  # (N, M)

    value, project = paper.attention_value_matrix(H, W_V), paper.attention_output_matrix(W_O, tokens)
    torch.testing.assert_close(value @ paper.vectorise(X), paper.vectorise(concatenated))
    torch.testing.assert_close(project @ paper.vectorise(concatenated), paper.vectorise(output))

    whole = paper.attention_matrix(H, W_V, W_O)
    torch.testing.assert_close(whole @ paper.vectorise(X), paper.vectorise(output))
    torch.testing.assert_close(whole, project @ value)
    torch.testing.assert_close(whole, sum(torch.kron(H[h], (W_V[h] @ W_O[h]).mT.contiguous()) for h in range(heads)))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_matrix_is_torch_multihead_attention(causal: bool) -> None:
    heads, tokens, hidden = 3, 4, 6
    d = hidden // heads
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(hidden, heads, bias=False, batch_first=True, dtype=torch.float64)
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if causal else None
    X = normal(1, tokens, hidden)
    with torch.no_grad():
        output, H = module(X, X, X, attn_mask=later, average_attn_weights=False)
        W_V = module.in_proj_weight[2 * hidden :].mT.reshape(hidden, heads, d).transpose(0, 1)
        W_O = module.out_proj.weight.mT.reshape(heads, d, hidden)
        matrix = paper.attention_matrix(H, W_V, W_O)
    torch.testing.assert_close((matrix @ paper.vectorise(X)).reshape(tokens, -1), output)
    assert paper.density(matrix) == pytest.approx((tokens + 1) / (2 * tokens) if causal else 1)


def test_attention_value_rows_are_token_first_head_second() -> None:
    heads, tokens, hidden, d = 2, 3, 4, 2
    H, W_V, _ = attention_parts(0, heads, tokens, hidden, d)
    stacked = torch.cat([torch.kron(H[h], W_V[h].mT.contiguous()) for h in range(heads)])  # rows (h, i, b)
    order = torch.arange(heads * tokens * d).reshape(heads, tokens, d).transpose(0, 1).reshape(-1)
    value = paper.attention_value_matrix(H, W_V)
    torch.testing.assert_close(value, stacked[order])
    assert not torch.allclose(value, stacked)


def test_a_causal_mask_limits_the_density_of_every_step() -> None:
    heads, tokens, hidden, d = 2, 5, 3, 2
    H, W_V, W_O = attention_parts(0, heads, tokens, hidden, d)
    limit = (tokens + 1) / (2 * tokens)
    assert paper.density(paper.attention_value_matrix(H, W_V)) == pytest.approx(limit)
    assert paper.density(paper.attention_matrix(H, W_V, W_O)) == pytest.approx(limit)
    assert paper.density(paper.attention_output_matrix(W_O, tokens)) == pytest.approx(1 / tokens)


@pytest.mark.parametrize(
    ("shapes", "culprit"),
    [
        (((2, 3, 4), (2, 5, 2), (2, 2, 5)), "H"),
        (((2, 3, 3), (1, 5, 2), (2, 2, 5)), "W_V"),
        (((2, 3, 3), (2, 5, 2), (1, 2, 5)), "W_O"),
        (((2, 3, 3), (2, 5, 2), (2, 5, 2)), "W_O"),
    ],
)
def test_attention_refuses_shapes_that_contradict_each_other(
    shapes: tuple[tuple[int, int, int], ...], culprit: str
) -> None:
    H, W_V, W_O = (torch.ones(shape) for shape in shapes)
    with pytest.raises(InputError, match=f"^{culprit}: expected shape"):
        paper.attention_matrix(H, W_V, W_O)
    if culprit != "W_O":
        with pytest.raises(InputError, match=f"^{culprit}: expected shape"):
            paper.attention_value_matrix(H, W_V)


# Density and the guard


def test_density_counts_what_is_not_exactly_zero() -> None:
    assert paper.density(torch.tensor([[0.0, 1e-300], [-2.0, -0.0]], dtype=torch.float64)) == 0.5
    assert paper.density(torch.zeros(2, 3)) == 0.0
    with pytest.raises(InputError, match=r"shape \(0, 3\)"):
        paper.density(torch.zeros(0, 3))
