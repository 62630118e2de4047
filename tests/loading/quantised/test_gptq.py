"""What of GPTQ and AWQ is refused, and zero points at the end of their range; the numbers: test_find.py."""

from __future__ import annotations

import pytest
import torch
from quantised_golden import cases, found_in, values

from duat_cli.loading.quantised.formula import UnfitError, UnknownFormatError


def test_a_zero_point_of_zero_is_stored_as_the_largest_number() -> None:
    """GPTQ's first format stores zero points less one."""
    held = cases("gptqmodel")["gptq 4"]
    stored = {**held.stored, "layer.qzeros": torch.full_like(held.stored["layer.qzeros"], -1)}
    formula = found_in(held.config, stored).weights["layer.weight"]
    made = values(formula, stored)
    assert (made >= 0).all()
    assert made.max() > 0


def test_bits_by_the_order_of_groups_where_the_config_names_others() -> None:
    """As configs do that give some modules other bits (`dynamic`)."""
    held = cases("gptqmodel")["gptq 8"]
    config = {**held.config, "bits": 4, "dynamic": {"+:.*down_proj": {"bits": 8}}}
    formula = found_in(config, held.stored).weights["layer.weight"]
    assert torch.equal(values(formula, held.stored), values(
        found_in(held.config, held.stored).weights["layer.weight"], held.stored
    ))  # fmt: skip


def test_groups_of_single_modules_are_those_of_the_first_pattern_that_fits() -> None:
    held = cases("gptqmodel")["gptq 4"]
    size, wrong = held.config["group_size"], {**held.config, "group_size": 2 * held.config["group_size"]}
    dynamic = {"-:layer": {}, "other": {"group_size": 1}, "+:lay": {"group_size": size}, "layer": {"group_size": 1}}
    formula = found_in({**wrong, "dynamic": dynamic}, held.stored).weights["layer.weight"]
    own = found_in(held.config, held.stored).weights["layer.weight"]
    assert torch.equal(values(formula, held.stored), values(own, held.stored))
    with pytest.raises(UnfitError, match="expected one row for each"):
        found_in({**wrong, "dynamic": {"other": {"group_size": size}}}, held.stored)
    with pytest.raises(UnknownFormatError, match="no regular expression"):
        found_in({**wrong, "dynamic": {"+:(": {"group_size": size}}}, held.stored)


def test_a_number_of_bits_that_is_not_read() -> None:
    held = cases("gptqmodel")["gptq 4"]
    stored = {name: tensor for name, tensor in held.stored.items() if name != "layer.g_idx"}
    with pytest.raises(UnfitError, match="expected numbers of 2, 3, 4, 8 bits; the config states '5'"):
        found_in({**held.config, "bits": 5}, stored)


def test_the_format_names_the_bits_that_are_stored() -> None:
    held = cases("gptqmodel")["gptq 8"]
    assert found_in({**held.config, "bits": 4}, held.stored).format.startswith("gptq (8 bits")


def test_a_lost_order_of_groups() -> None:
    """With act-order, or with groups of which the last is shorter, inputs in turn are other weights."""
    held = cases("gptqmodel")["gptq 4"]
    stored = {name: tensor for name, tensor in held.stored.items() if name != "layer.g_idx"}
    with pytest.raises(UnfitError, match=r"its 'layer.g_idx' is missing"):
        found_in({**held.config, "desc_act": True}, stored)
    groups = len(stored["layer.scales"])
    inputs = len(held.stored["layer.g_idx"])
    shorter = inputs // (groups - 1) - 1  # as many groups, of which the last is shorter
    assert -(-inputs // shorter) == groups
    with pytest.raises(UnfitError, match=f"expected one row for each {shorter} inputs"):
        found_in({**held.config, "desc_act": False, "group_size": shorter}, stored)


def test_an_order_in_which_all_inputs_are_of_one_group_of_many() -> None:
    """One kernel takes it for inputs in turn, another for what it says."""
    held = cases("gptqmodel")["gptq 4"]
    stored = {**held.stored, "layer.g_idx": torch.zeros_like(held.stored["layer.g_idx"])}
    with pytest.raises(UnfitError, match=r"groups 0 to 0 of \d that have scales"):
        values(found_in(held.config, stored).weights["layer.weight"], stored)


def test_scales_of_an_activation_function() -> None:
    """AutoAWQ's, without which the model computes something else."""
    held = cases("gptqmodel")["awq"]
    with pytest.raises(UnfitError, match=r"'mlp.act.scales': scales of an activation function"):
        found_in(held.config, {**held.stored, "mlp.act.scales": torch.ones(4)})
