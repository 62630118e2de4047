"""FP8 against transformers' own dequantisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised_golden import found_in, same, values
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from duat_cli.loading.quantised.formula import UnfitError

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8 = torch.float8_e4m3fn


def weight(*shape: int, dtype: torch.dtype = FP8, seed: int = 0) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def theirs(quantised: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Fp8Dequantize(None)._dequantize_one(quantised, scales, dtype)


@pytest.mark.parametrize(
    ("leaf", "scales"),
    [
        ("weight_scale_inv", torch.rand(2, 3)),
        ("weight_scale_inv", torch.rand(2, 3).bfloat16()),
        ("weight_scale_inv", torch.rand(1, 1)),
        ("scale", torch.tensor([[120, 127, 128], [1, 130, 125]]).to(torch.uint8)),
        ("weight_scale_inv", torch.tensor([[120, 127, 128], [1, 130, 125]]).to(torch.uint8).view(torch.float8_e8m0fnu)),
        ("qscale_weight", torch.rand(1, 1)),
        ("weight_scale", torch.rand(256, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight(leaf: str, scales: torch.Tensor, dtype: torch.dtype) -> None:
    stored = {"a.weight": weight(256, 384), f"a.{leaf}": scales}
    [(name, formula)] = found_in(BLOCKS, stored).weights.items()
    assert name == "a.weight"
    assert same(values(formula, stored), theirs(stored["a.weight"], scales, dtype))


@pytest.mark.parametrize("method", ["fp8", "mxfp8"])
def test_mxfp8(method: str) -> None:
    exponents = torch.randint(100, 140, (64, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    stored = {"a.weight": weight(64, 96), "a.weight_scale_inv": exponents}
    found = found_in({"quant_method": method, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, stored)
    assert found.format == "fp8 (e4m3, blocks of 1 x 32)"
    powers = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    made = values(found.weights["a.weight"], stored)
    assert torch.equal(made.double(), stored["a.weight"].double() * powers)
    assert same(made, theirs(*stored.values(), torch.float32))


def test_experts_in_one_tensor() -> None:
    stored = {"gate_up_proj": weight(3, 256, 128), "gate_up_proj_scale_inv": torch.rand(3, 2, 1)}
    formula = found_in(BLOCKS, stored).weights["gate_up_proj"]
    assert same(values(formula, stored), theirs(*stored.values(), torch.float32))


def test_experts_of_four_bits() -> None:
    """DeepSeek-V4's: two numbers a byte, 32 share a power of two."""
    codes = torch.randint(-128, 128, (64, 48), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    exponents = torch.randint(100, 140, (64, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    stored = {"a.weight": codes, "a.scale": exponents.view(torch.float8_e8m0fnu), "b.weight": weight(2, 2)}
    stored["b.scale"] = torch.ones(1, 1)
    found = found_in(BLOCKS, stored)
    assert found.format == "fp8 (e4m3, fp4 e2m1, blocks of 128 x 128)"
    assert same(values(found.weights["a.weight"], stored), theirs(codes, stored["a.scale"], torch.float32))


def test_sides_that_blocks_do_not_divide() -> None:
    """transformers refuses these; DeepSeek-V3 has them (576 rows), and its own kernel cuts the last block."""
    stored = {"a.weight": weight(200, 130), "a.weight_scale_inv": torch.rand(2, 2)}
    grid = stored["a.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :130]
    made = values(found_in(BLOCKS, stored).weights["a.weight"], stored)
    assert same(made, stored["a.weight"].float() * grid)


def test_blocks_that_the_config_names_are_meant() -> None:
    """192 rows in two blocks of 128 are not two of 96."""
    stored = {"a.weight": weight(192, 128), "a.weight_scale_inv": torch.tensor([[1.0], [2.0]])}
    made = values(found_in(BLOCKS, stored).weights["a.weight"], stored)
    assert same(made[96:128], stored["a.weight"].float()[96:128])
    assert same(made[128:], 2 * stored["a.weight"].float()[128:])


def test_scales_of_activations_are_left_out() -> None:
    stored: dict[str, Any] = {"a.weight": weight(4, 4), "a.weight_scale_inv": torch.tensor(0.5)}
    stored |= {"a.activation_scale": torch.tensor(1.0), "a.input_scale": torch.ones(1), "norm.weight": torch.ones(4)}
    found = found_in({"quant_method": "fp8", "activation_scheme": "static"}, stored)
    assert found.beside == {"a.activation_scale", "a.input_scale"}
    assert found.format == "fp8 (e4m3, a scale for each row or tensor)"
    assert list(found.weights) == ["a.weight"]


def test_a_weight_without_scales() -> None:
    with pytest.raises(UnfitError, match=r"'a.weight': quantised \(F8_E4M3\), but its 'a.weight_scale_inv' is missing"):
        found_in(BLOCKS, {"a.weight": weight(4, 4)})
