"""What classes of models read, and made-up pictures and sounds: what tiny models of every kind take."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    PreTrainedConfig,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperModel,
)

from duat_cli.models.discovery.modality import input_name, stack_of
from duat_cli.zoo.inputs import MOST_VALUES, made_inputs, modality_of, modality_of_type
from duat_cli.zoo.tiny import TinyError, tiny_model

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SOUND = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
WAVES = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}


def test_a_picture_a_spectrogram_and_samples() -> None:
    models = {
        (1, 3, 16, 16): ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=4)),
        (1, 8, 32): WhisperModel(
            WhisperConfig(**SOUND, num_mel_bins=8, max_source_positions=16, vocab_size=9, pad_token_id=0)
        ),
        (1, 8000): Wav2Vec2Model(
            Wav2Vec2Config(**SMALL, **WAVES, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
        ),
    }
    for shape, model in models.items():
        made = made_inputs(model.eval(), stack_of(model), input_name(model))
        assert [tuple(value.shape) for value in made.values()] == [shape]
        with torch.no_grad():
            assert bool(torch.isfinite(stack_of(model)(**made)[0]).all())


def test_patches_go_with_their_numbers() -> None:
    model = tiny_model("qwen3_vl_vision")
    made = made_inputs(model, model, input_name(model))
    assert made["grid_thw"].tolist() == [[1, 4, 4]]
    assert made["hidden_states"].shape == (16, model.patch_embed.proj.weight[0].numel())


def test_what_takes_something_else_is_said() -> None:
    model = ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=4))
    with pytest.raises(TinyError, match="no made-up `input_values` suits it: "):
        made_inputs(model, model, "input_values")


def test_what_a_model_would_make_a_large_tensor_of_is_not_tried_on() -> None:
    """Such as the square of the samples of a sound, of which a convolution then makes many."""
    taken, read = set(), []

    class Squares(nn.Module):
        config = PreTrainedConfig()

        def forward(self, input_values: torch.Tensor) -> torch.Tensor:
            taken.add(input_values.numel())
            read.append(torch.outer(input_values.flatten(), input_values.flatten()).numel())
            raise ValueError("it takes nothing")

    with pytest.raises(TinyError, match="it takes nothing"):
        made_inputs(Squares(), Squares(), "input_values")
    assert max(read) <= MOST_VALUES < max(taken) ** 2


READ = {
    "LlamaForCausalLM": "text",
    "T5ForConditionalGeneration": "text",
    "ViTModel": "vision",
    "WhisperForConditionalGeneration": "audio",
    "CLIPModel": "vision-language",
    "ClapModel": "audio-language",
    "Phi4MultimodalForCausalLM": "several",
    "PatchTSTModel": "other",
}


@pytest.mark.parametrize("name", READ)
def test_by_the_arguments_of_its_forward_pass(name: str) -> None:
    assert modality_of(getattr(transformers, name)) == READ[name]


def test_of_a_type_by_its_base_model() -> None:
    assert [modality_of_type(name) for name in ("swin", "no such type")] == ["vision", "other"]
