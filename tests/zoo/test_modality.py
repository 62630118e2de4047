"""What classes of models read."""

from __future__ import annotations

import pytest
import transformers

from duat_cli.zoo.modality import modality_of, modality_of_type

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
