"""What generation_config.json may hold, against what transformers' own `generate` does with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from duat_cli.compat.generation import generation_defaults, sampling_fault
from duat_cli.zoo.tiny import tiny_model


def test_defaults_of_generation() -> None:
    found = generation_defaults()
    assert {"temperature": 1.0, "do_sample": False, "num_beams": 1}.items() <= found.items()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


VALUES = {
    "temperature": [-1, -1.0, 0, 0.0, 0.7, 1, 1.0, 2, 2.0, "0.7"],
    "top_k": [-1, 0, 1, 50, 2.0],
    "top_p": [-0.5, 0.0, 0.9, 1, 2.0],
    "min_p": [-0.1, 0.0, 0.5, 1.5],
    "typical_p": [-1.0, 0.0, 0.5, 1.0, 2],
    "repetition_penalty": [-1.0, 0, 1, 1.0, 1.2, 2, 2.0],
}


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALUES.items() for value in values])
def test_a_value_is_refused_where_generate_refuses_it(name: str, value: Any, sampled: bool, model: Any) -> None:
    stated = {"do_sample": sampled, name: value}
    config = transformers.GenerationConfig.from_dict({**stated, "max_new_tokens": 2, "pad_token_id": 0})
    torch.manual_seed(0)
    try:
        model.generate(torch.tensor([[1, 2, 3]]), generation_config=config)
        said = None
    except (ValueError, TypeError) as fault:
        said = f"{name}: {fault}"
    assert sampling_fault(stated) == said
