"""What of compressed-tensors is refused, and what is left out; the numbers: test_find.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantised_golden import cases, found_in, values

from duat_cli.loading.quantised.formula import UnfitError
from duat_cli.loading.quantised.found import UnknownFormatError


def test_columns_in_another_order() -> None:
    """weight_g_idx says which group each input is in."""
    held = cases("compressed_tensors")["int4"]
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)) % 3
    stored = {**held.stored, "layer.weight_g_idx": order.to(torch.int32)}
    plain = values(found_in(held.config, held.stored).weights["layer.weight"], held.stored)
    scale = held.stored["layer.weight_scale"]
    codes = (plain / scale.repeat_interleave(32, 1)).round()
    assert torch.equal(values(found_in(held.config, stored).weights["layer.weight"], stored), codes * scale[:, order])


def test_scales_of_activations_and_caches_are_left_out() -> None:
    held = cases("compressed_tensors")["fp8 a tensor"]
    beside = {"layer.input_scale": torch.ones(1), "attn.k_scale": torch.ones(1), "attn.v_scale": torch.ones(1)}
    found = found_in(held.config, {**held.stored, **beside})
    assert found.beside == set(beside)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("format", "nvfp4-pack-quantized", "format 'nvfp4-pack-quantized'"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "format 'sparse-24-bitmask'"),
        ("transform_config", {"config_groups": {}, "R1": 1}, "format 'transform_config'"),
    ],
)
def test_a_layout_that_is_not_read(field: str, value: Any, part: str) -> None:
    held = cases("compressed_tensors")["int4"]
    with pytest.raises(UnknownFormatError, match=part):
        found_in({**held.config, field: value}, held.stored)


def test_weights_that_are_not_compressed() -> None:
    """Saved in the middle of a calibration: the numbers are not those that the model computes with."""
    held = cases("compressed_tensors")["int8 a row"]
    stored = {**held.stored, "layer.weight": held.expected}
    with pytest.raises(UnfitError, match=r"'layer.weight': stored as F32 beside its scales, not compressed"):
        found_in(held.config, stored)


def test_bits_that_do_not_fit() -> None:
    held = cases("compressed_tensors")["int4"]
    config = copy.deepcopy(held.config)
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    with pytest.raises(UnfitError, match=r"I32 of \[40, 12\] does not hold \[40, 96\] in 8 bits"):
        found_in(config, held.stored)
    config["config_groups"]["group_0"]["weights"].update(num_bits=4, group_size=16)
    with pytest.raises(UnfitError, match="groups of"):
        found_in(config, held.stored)


def test_a_shape_that_is_none() -> None:
    held = cases("compressed_tensors")["int4"]
    with pytest.raises(UnfitError, match="expected two sizes, got -1 and 96"):
        found_in(held.config, {**held.stored, "layer.weight_shape": torch.tensor([-1, 96])})
