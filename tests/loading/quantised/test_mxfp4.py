"""MXFP4 against transformers' own conversion."""

from __future__ import annotations

import pytest
import torch
from quantised_golden import found_in, same, values
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from duat_cli.loading.quantised.formula import UnfitError

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def experts(low: int = 90, high: int = 160) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 20, 4, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(low, high, (3, 20, 4), generator=generator).to(torch.uint8)
    return {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponents", [(90, 160), (0, 10), (245, 250)])
def test_experts(exponents: tuple[int, int], dtype: torch.dtype) -> None:
    """bfloat16 holds every number, down to the smallest exponents."""
    stored = experts(*exponents)
    found = found_in(CONFIG, stored)
    formula = found.weights["e.down_proj"]
    assert formula.shape == (3, 128, 20)
    assert formula.exact_in == "BF16"
    made = values(formula, stored)
    assert same(made, convert_moe_packed_tensors(*stored.values(), dtype=dtype))
    assert torch.equal(made.bfloat16().float(), made)
    assert same(values(formula, stored, at_once=formula.step), made)


def test_no_number_has_no_number() -> None:
    """Of exponent 255 the specification says NaN; transformers takes it for 128."""
    stored = experts(255, 256)
    assert values(found_in(CONFIG, stored).weights["e.down_proj"], stored).isnan().all()


def test_what_does_not_fit() -> None:
    stored = experts()
    for name, tensor, part in (
        ("e.down_proj_blocks", stored["e.down_proj_blocks"][..., :8], r"expected U8 of \[experts, out, groups, 16\]"),
        ("e.down_proj_scales", stored["e.down_proj_scales"][:, 1:], r"expected \[3, 20, 4\]"),
        (
            "e.down_proj_scales",
            stored["e.down_proj_scales"].float(),
            "dtype F32, beside 'e.down_proj_blocks' expected U8",
        ),
    ):
        with pytest.raises(UnfitError, match=part):
            found_in(CONFIG, {**stored, name: tensor.contiguous()})
    with pytest.raises(UnfitError, match=r"'e.down_proj_scales': scales without their '_blocks'"):
        found_in(CONFIG, {"e.down_proj_scales": stored["e.down_proj_scales"]})
