"""What of compressed-tensors is refused, and what is left out; the numbers: test_find.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantised_golden import cases, found_in, values

from duat_cli.loading.quantised.formula import UnfitError, UnknownFormatError


def test_columns_in_another_order() -> None:
    """weight_g_idx says which group each input is in."""
    held = cases("compressed_tensors")["int4"]
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)) % 3
    stored = {**held.stored, "layer.weight_g_idx": order.to(torch.int32)}
    plain = values(found_in(held.config, held.stored).weights["layer.weight"], held.stored)
    scale = held.stored["layer.weight_scale"]
    codes = (plain / scale.repeat_interleave(32, 1)).round()
    assert torch.equal(values(found_in(held.config, stored).weights["layer.weight"], stored), codes * scale[:, order])


def changed(config: dict[str, Any], **scheme: Any) -> dict[str, Any]:
    """The same with fields of the first group's weights."""
    found = copy.deepcopy(config)
    found["config_groups"]["group_0"]["weights"].update(scheme)
    return found


def test_a_lost_order_of_columns() -> None:
    held = cases("compressed_tensors")["int4"]
    with pytest.raises(UnfitError, match=r"its 'layer.weight_g_idx' is missing"):
        found_in(changed(held.config, actorder="group"), held.stored)
    assert found_in(changed(held.config, actorder="weight"), held.stored).weights


@pytest.mark.parametrize("case", ["int4", "int8 a row"])
def test_zero_points_are_there_where_the_config_says_so(case: str) -> None:
    held = cases("compressed_tensors")[case]
    symmetric = changed(held.config, symmetric=True)
    without = {name: tensor for name, tensor in held.stored.items() if not name.endswith("zero_point")}
    assert found_in(symmetric, without).weights
    with pytest.raises(UnfitError, match=r"its 'layer.weight_zero_point' is missing"):
        found_in(changed(held.config, symmetric=False), without)
    with pytest.raises(UnfitError, match=r"zero points of 'layer.weight\w*', which is symmetric by the config"):
        found_in(symmetric, {**without, "layer.weight_zero_point": torch.zeros(40, 1, dtype=torch.int8)})


def test_a_module_is_of_the_group_that_names_it() -> None:
    """By name or pattern; a class is for the rest. Another group's zero points are none of its own."""
    held = cases("compressed_tensors")["int4"]
    without = {name: tensor for name, tensor in held.stored.items() if not name.endswith("zero_point")}
    config = changed(held.config, symmetric=True)
    other = {"weights": {**config["config_groups"]["group_0"]["weights"], "symmetric": False}, "targets": ["re:lay.*"]}
    assert found_in({**config, "config_groups": {**config["config_groups"], "b": {**other, "targets": ["x"]}}}, without)
    with pytest.raises(UnfitError, match="is missing"):
        found_in({**config, "config_groups": {**config["config_groups"], "b": other}}, without)


def test_blocks_may_be_stated_as_a_text() -> None:
    codes = torch.ones(6, 6, dtype=torch.int8)
    stored = {"layer.weight": codes, "layer.weight_scale": torch.arange(6.0).reshape(2, 3)}
    weights = {"num_bits": 8, "strategy": "block", "block_structure": "3x2"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"a": {"weights": weights}},
    }
    grid = stored["layer.weight_scale"].repeat_interleave(3, 0).repeat_interleave(2, 1)
    found = found_in(config, stored)
    assert torch.equal(values(found.weights["layer.weight"], stored), grid)
    assert "blocks of 3 x 2" in found.format


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


def test_a_format_by_which_nothing_is_compressed() -> None:
    """The files decide: whoever reads them says that the field is one too many."""
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {"a": {"weights": {}}}}
    stored = {"layer.weight": torch.ones(4, 4)}
    assert not found_in(config, stored).weights
    with pytest.raises(UnknownFormatError, match="format 'dense'"):
        found_in(config, {**stored, "layer.weight_scale": torch.ones(1)})


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
