"""Weights that transformers changes once it has read them are the same where they are read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paging import in_parts, whole
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from duat_cli.compat.transformers import eager_model
from duat_cli.errors import CheckpointError
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.paged.initialised import initialise
from duat_cli.zoo import tiny
from duat_cli.zoo.randomise import randomise

PADDING = 5


def padded(model_type: str) -> Any:
    """A random model whose embedding has a padding row, which is not zero."""
    model = tiny.tiny_model(model_type)
    config, cls = model.config, type(model)
    config.get_text_config().pad_token_id = PADDING
    found = eager_model(cls, config, torch.float32)
    randomise(found, 0)
    return found.eval()


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("chinese_clip_text_model", "embeddings.word_embeddings.weight"),
        ("funnel", "funnel.embeddings.word_embeddings.weight"),  # which its head shares
        ("youtu", "model.embed_tokens.weight"),
        ("zaya", "model.layers.0.mlp.gate.balancing_biases"),  # a saved buffer
    ],
)
def test_what_is_set_once_weights_are_read_is_set_in_parts_too(model_type: str, name: str, tmp_path: Path) -> None:
    model = padded(model_type)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")[name]
    assert not torch.equal(plain.state_dict()[name], stored)  # else this shows nothing
    known = whole(tmp_path)
    with in_parts(tmp_path) as loaded:
        assert loaded.paged is not None
        in_turn = loaded.paged.fingerprint(loaded.model)
    assert in_turn == fingerprint(known.model) == fingerprint(plain)


class Drawing(PreTrainedModel):
    """A model that draws weights anew whatever was read; of code that is not transformers' own it would be stopped."""

    @classmethod
    def is_custom_code(cls) -> bool:
        return False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = nn.Linear(3, 3)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight.detach())


def test_what_is_drawn_once_weights_are_read_is_refused() -> None:
    config = tiny.tiny_config("llama")
    with torch.device("meta"):
        model = Drawing(config)
    with pytest.raises(CheckpointError, match=r"layer\.weight.*drawn or computed by transformers once it has read"):
        initialise(model, Drawing, config, "cpu")
