"""Least squares from sums, against numpy's lstsq on the tokens themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from duat_cli.operators.refit import RIDGES, Moments, chosen_ridge


def drawn(tokens: int, features: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens, features, generator=generator, dtype=torch.float64) @ mixing
    return inputs, torch.randn(tokens, outputs, generator=generator, dtype=torch.float64)


def moments(inputs: Tensor, lacking: Tensor, step: int = 7) -> Moments:
    """In a stream of a few tokens at a time."""
    found = Moments(inputs.shape[1], lacking.shape[1], inputs.device)
    for x, r in zip(inputs.split(step), lacking.split(step), strict=True):
        found.add(x, r)
    return found


@pytest.mark.parametrize(("tokens", "features"), [(60, 9), (9, 9), (5, 12)])
@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10.0])
def test_the_change_is_that_of_lstsq_with_the_ridge_as_further_rows(tokens: int, features: int, ridge: float) -> None:
    inputs, lacking = drawn(tokens, features, 4, seed=tokens)
    size = float(inputs.square().sum()) / features
    rows = np.vstack([inputs.numpy(), np.sqrt(ridge * size) * np.eye(features)])
    expected = np.linalg.lstsq(rows, np.vstack([lacking.numpy(), np.zeros((features, 4))]), rcond=None)[0]
    got = moments(inputs, lacking).change(ridge)
    assert got is not None
    assert np.allclose(got.numpy(), expected, rtol=1e-8, atol=1e-10)
    left = float((lacking - inputs @ got).square().sum())
    assert moments(inputs, lacking).error(got) == pytest.approx(left, rel=1e-8)
    assert left <= float(lacking.square().sum())


def test_a_bias_has_no_ridge() -> None:
    """Of inputs less their means, by lstsq with the ridge; the bias is the mean of what is left."""
    inputs, lacking = drawn(60, 9, 4, seed=5)
    inputs, lacking = inputs + 3, lacking + 2
    size = 0.1 * float(inputs.square().sum()) / 9
    rows = np.vstack([inputs - inputs.mean(0), np.sqrt(size) * np.eye(9)])
    weights = np.linalg.lstsq(rows, np.vstack([lacking - lacking.mean(0), np.zeros((9, 4))]), rcond=None)[0]
    sums = Moments(10, 4, inputs.device, bias=True)
    sums.add(torch.cat([inputs, torch.ones(60, 1, dtype=torch.float64)], dim=1), lacking)
    got = sums.change(0.1)
    assert got is not None
    assert np.allclose(got[:-1].numpy(), weights, rtol=1e-8, atol=1e-10)
    assert np.allclose(got[-1].numpy(), (lacking - inputs @ torch.from_numpy(weights)).mean(0).numpy(), rtol=1e-8)


def test_the_ridge_is_the_one_that_leaves_least_on_other_tokens() -> None:
    inputs, noise = drawn(90, 12, 3, seed=3)
    lacking = inputs @ torch.ones(12, 3, dtype=torch.float64) * 0.2 + 3 * noise
    fit, back = moments(inputs[:20], lacking[:20]), moments(inputs[20:], lacking[20:])
    errors = {}
    for ridge in RIDGES:
        change = fit.change(ridge)
        assert change is not None
        errors[ridge] = float((lacking[20:] - inputs[20:] @ change).square().sum())
    best = min(errors, key=lambda ridge: errors[ridge])
    assert best not in (RIDGES[0], RIDGES[-1])  # else the test could not tell
    assert chosen_ridge(fit, back) == best
    assert [chosen_ridge(fit, back, near=ridge) for ridge in RIDGES] == [best] * len(RIDGES)


def test_no_change_is_a_choice() -> None:
    """What the fit explains is the opposite on the tokens that are held back."""
    inputs, _ = drawn(40, 5, 2, seed=8)
    lacking = inputs[:, :2].clone()
    assert chosen_ridge(moments(inputs, lacking), moments(inputs, lacking)) == RIDGES[0]
    for near in (None, RIDGES[0]):
        assert chosen_ridge(moments(inputs, lacking), moments(inputs, -lacking), near=near) is None


def test_sums_join_and_nothing_leaves_nothing_to_fit() -> None:
    inputs, lacking = drawn(30, 6, 2, seed=1)
    parts = moments(inputs[:11], lacking[:11])
    parts.join(moments(inputs[11:], lacking[11:]))
    whole = moments(inputs, lacking)
    assert parts.tokens == whole.tokens == 30
    for ridge in RIDGES:
        one, other = parts.change(ridge), whole.change(ridge)
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-9)
    assert Moments(6, 2, inputs.device).change(1.0) is None
    zeros = moments(torch.zeros_like(inputs), lacking)
    assert zeros.change(1.0) is None
    assert chosen_ridge(zeros, whole) is None
