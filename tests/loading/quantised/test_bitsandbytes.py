"""What of bitsandbytes is refused, and what is read beside the usual; the numbers: test_find.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from quantised_golden import cases, found_in, values

from duat_cli.loading.quantised.formula import UnfitError

STATE = "layer.weight.quant_state.bitsandbytes__nf4"


def changed(**fields: Any) -> dict[str, torch.Tensor]:
    """The state of the doubly quantised weight with other fields."""
    stored = cases("bitsandbytes")["nf4 doubly"].stored
    said = json.loads(bytes(stored[STATE].tolist())) | fields
    return {**stored, STATE: torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)}


CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def test_bytes_held_as_another_dtype() -> None:
    """bnb_4bit_quant_storage: the same bytes, as FSDP wants them."""
    held = cases("bitsandbytes")["nf4"]
    other = {**held.stored, "layer.weight": held.stored["layer.weight"].reshape(-1).view(torch.bfloat16)[:, None]}
    one, two = (found_in(CONFIG, s).weights["layer.weight"] for s in (held.stored, other))
    assert torch.equal(values(one, held.stored), values(two, other))


@pytest.mark.parametrize(
    ("stored", "part"),
    [
        (changed(shape=[40, 127]), "2560 bytes do not hold"),
        (changed(shape="x"), "are no sizes"),
        (changed(blocksize=0), "are no sizes"),
        (changed(blocksize=128), r"expected \[40\]"),
        (changed(nested_blocksize=-1), "are no numbers"),
        (changed(nested_blocksize=None), "absmax"),
        ({**changed(), STATE: torch.tensor([1, 2], dtype=torch.uint8)}, "holds no JSON"),
        ({**changed(), STATE: torch.tensor(list(b"[]"), dtype=torch.uint8)}, "holds no JSON object"),
        ({n: t for n, t in changed().items() if n != "layer.weight"}, "which is missing"),
    ],
)
def test_a_state_that_does_not_fit(stored: dict[str, torch.Tensor], part: str) -> None:
    with pytest.raises(UnfitError, match=part):
        found_in(CONFIG, stored)


def test_values_in_the_order_of_another_gpu() -> None:
    held = cases("bitsandbytes")["int8"]
    stored = {**held.stored, "layer.weight_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(UnfitError, match=r"'layer.weight_format': values are not stored by rows"):
        found_in(held.config, stored)
