"""Models whose last blocks read keys and values of blocks in front, small."""

from __future__ import annotations

from typing import Any

import torch
from helpers import single_model


def gemma4() -> Any:
    """Four blocks: block 0 hands keys and values on to block 2, block 1 to block 3."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig  # the oldest transformers has neither of these models

    shape = single_model("gemma4_text").config.to_dict() | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    }
    shape.pop("per_layer_config", None)
    return _shaken(Gemma4ForCausalLM(Gemma4TextConfig(**shape)))


def mistral_large4() -> Any:
    """Three blocks: block 0 hands on what keys and values are made of."""
    from transformers import MistralLarge4TextConfig, MistralLarge4TextModel

    shape = single_model("mistral_large4_text").config.to_dict()
    shared = {"kv_source_layers": [0, 0, 0], "no_rope_layers": [1, 1, 1]}
    return _shaken(MistralLarge4TextModel(MistralLarge4TextConfig(**shape | shared)))


SHARING = {"gemma4 sharing": gemma4, "mistral_large4 sharing": mistral_large4}


def model_of(model_type: str) -> Any:
    """One of these, or a tiny model of that type as it is."""
    return SHARING[model_type]() if model_type in SHARING else single_model(model_type)


def _shaken(model: Any) -> Any:
    """With weights far from their first values, gains among them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()
