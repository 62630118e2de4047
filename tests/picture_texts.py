"""Tiny models that read pictures or sound within a text, and what each is run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from duat_cli.models.instrument.calls import taken_by
from duat_cli.zoo.randomise import randomise

MARK = 7  # the token id that stands for a piece of a picture
HEARD = "qwen2_audio"  # the one that reads sound
VIDEO_MARK = 8  # of a video, in Qwen-VL
SIZE = 16  # pixels a side
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EYE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIZE,
    "patch_size": 4,
}  # fmt: skip
QWEN_EYE: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_IDS = {"video_token_id": VIDEO_MARK, "vision_start_token_id": 5, "vision_end_token_id": 6, "image_token_id": MARK}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def llava() -> Any:
    eye = t.CLIPVisionConfig(**EYE, projection_dim=16)
    return t.LlavaConfig(vision_config=eye, text_config=t.LlamaConfig(**TEXT), image_token_id=MARK)


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = t.Gemma3TextConfig(**TEXT, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=8)
    eye = t.SiglipVisionConfig(**EYE, vision_use_head=False)
    marks = {"image_token_id": MARK, "boi_token_id": 5, "eoi_token_id": 6}
    return t.Gemma3Config(vision_config=eye, text_config=text, mm_tokens_per_image=4, **marks)


def mistral3() -> Any:
    text, eye = t.MistralConfig(**TEXT), t.PixtralVisionConfig(**EYE)
    return t.Mistral3Config(vision_config=eye, text_config=text, image_token_id=MARK, spatial_merge_size=2)


def paligemma() -> Any:
    eye = t.SiglipVisionConfig(**EYE, vision_use_head=False, projection_dim=32)
    text = t.GemmaConfig(**TEXT)
    return t.PaliGemmaConfig(
        vision_config=eye, text_config=text, image_token_id=MARK, projection_dim=32, hidden_size=32, vocab_size=99
    )


def idefics3() -> Any:
    eye = t.Idefics3VisionConfig(**EYE)
    return t.Idefics3Config(vision_config=eye, text_config=t.LlamaConfig(**TEXT), image_token_id=MARK, scale_factor=2)


def internvl() -> Any:
    eye = t.InternVLVisionConfig(**{**EYE, "image_size": [SIZE, SIZE], "patch_size": [4, 4]})
    return t.InternVLConfig(
        vision_config=eye, text_config=t.Qwen2Config(**TEXT), image_token_id=MARK, image_seq_length=4
    )


def llama4() -> Any:
    eye = t.Llama4VisionConfig(
        **{**EYE, "intermediate_size": 64}, vision_output_dim=32, pixel_shuffle_ratio=0.5, projector_input_dim=32,
        projector_output_dim=32,
    )  # fmt: skip
    text = t.Llama4TextConfig(
        **TEXT, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=8,
        interleave_moe_layer_step=2,
    )  # fmt: skip
    return t.Llama4Config(vision_config=eye, text_config=text, image_token_index=MARK)


def qwen2_5_vl() -> Any:
    eye = {**QWEN_EYE, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [1]}
    return t.Qwen2_5_VLConfig(vision_config=eye, text_config={**TEXT, "rope_parameters": ROPE}, **QWEN_IDS)


def qwen3_vl() -> Any:
    eye = {**QWEN_EYE, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16}
    rope = {**ROPE, "mrope_interleaved": True}
    return t.Qwen3VLConfig(
        vision_config={**eye, "deepstack_visual_indexes": [0]},
        text_config={**TEXT, "rope_parameters": rope},
        **QWEN_IDS,
    )


def qwen2_audio() -> Any:
    ear = {
        "num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
        "max_source_positions": 16,
    }  # fmt: skip
    return t.Qwen2AudioConfig(audio_config=ear, text_config={**TEXT, "model_type": "qwen2"}, audio_token_id=MARK)


KINDS: dict[str, Callable[[], Any]] = {
    made.__name__: made
    for made in (llava, gemma3, mistral3, paligemma, idefics3, internvl, llama4, qwen2_5_vl, qwen2_audio, qwen3_vl)
}


RUNNING = sorted(KINDS.keys() - {"llama4"})  # whose own forward pass fails in transformers 5.24


def build(name: str) -> Any:
    torch.manual_seed(0)
    made = (
        t.Qwen2AudioForConditionalGeneration._from_config
        if name == HEARD
        else t.AutoModelForImageTextToText.from_config
    )
    model = made(KINDS[name](), attn_implementation="eager").eval()
    randomise(model, 0)
    return model.requires_grad_(False)


def inputs(name: str, model: Any, seed: int = 0) -> dict[str, Tensor]:
    """A picture or a sound of noise between random words, by the names of the forward pass."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(1, 3, SIZE, SIZE, generator=generator)
    if name == HEARD:
        made, pieces = {"input_features": torch.randn(1, 8, 32, generator=generator)}, 8
        made["feature_attention_mask"] = torch.ones(1, 32, dtype=torch.int64)
    elif name.startswith("qwen"):
        rows = torch.randn(64, 3 * 2 * 16, generator=generator)
        made, pieces = {"pixel_values": rows, "image_grid_thw": torch.tensor([[1, 8, 8]])}, 16
    else:
        made, pieces = {"pixel_values": pixels[None] if name == "idefics3" else pixels}, 4
        if name in ("llava", "paligemma"):
            pieces = 16
        if name == "mistral3":
            made["image_sizes"] = torch.tensor([[SIZE, SIZE]])
    ids = torch.randint(10, 90, (1, pieces + 9), generator=generator)
    ids[0, 3 : 3 + pieces] = MARK
    kinds = {kind: (ids == MARK).long() for kind in ("token_type_ids", "mm_token_type_ids")}
    taken = taken_by(model.base_model.forward)
    return {**made, "input_ids": ids, **{k: v for k, v in kinds.items() if k in taken}}


def video_inputs(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Two frames of noise between random words, for a Qwen-VL."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, 3 * 2 * 16, generator=generator)
    ids = torch.randint(10, 90, (1, 16 + 9), generator=generator)
    ids[0, 3:19] = VIDEO_MARK
    kinds = {"mm_token_type_ids": 2 * (ids == VIDEO_MARK).long()}
    taken = taken_by(model.base_model.forward)
    made = {"pixel_values_videos": rows, "video_grid_thw": torch.tensor([[1, 8, 8]]), "input_ids": ids}
    return {**made, **{k: v for k, v in kinds.items() if k in taken}}


def blocks_of(model: Any) -> list[Any]:
    """Those of the text."""
    stacks = ("language_model.layers", "text_model.layers")
    return [block for path, block in model.named_modules() if path.rpartition(".")[0].endswith(stacks)]


def doubled(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with numbers in float64."""
    return {key: value.double() if value.is_floating_point() else value for key, value in given.items()}


def save_llava(folder: Path) -> None:
    """With a tokenizer of words and a processor."""
    build("llava").save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<image>": MARK}
    words |= {word: 10 + k for k, word in enumerate(["What", "is", "in", "the", "picture", "?", "a", "cat", "USER"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    eye = t.CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=SIZE)
    t.LlavaProcessor(
        eye, tokenizer, patch_size=4, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
