"""What of GPTQ and AWQ is refused, and zero points at the end of their range; the numbers: test_find.py."""

from __future__ import annotations

import pytest
import torch
from quantised_golden import cases, found_in, values

from duat_cli.loading.quantised.formula import UnfitError


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


def test_a_number_of_bits_that_is_not_read() -> None:
    held = cases("gptqmodel")["gptq 4"]
    stored = {name: tensor for name, tensor in held.stored.items() if name != "layer.g_idx"}
    with pytest.raises(UnfitError, match="expected numbers of 2, 3, 4, 8 bits; the config states '5'"):
        found_in({**held.config, "bits": 5}, stored)


def test_scales_of_an_activation_function() -> None:
    """AutoAWQ's, without which the model computes something else."""
    held = cases("gptqmodel")["awq"]
    with pytest.raises(UnfitError, match=r"'mlp.act.scales': scales of an activation function"):
        found_in(held.config, {**held.stored, "mlp.act.scales": torch.ones(4)})
