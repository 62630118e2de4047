"""Tiny models of images and sound, and inputs that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import save_file
from torch import Tensor

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
WINDOWS: dict[str, Any] = {  # a map of 8 x 8 is padded to windows of 3 x 3, and so is one of 4 x 4
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 3,
}  # fmt: skip
MAP: dict[str, Any] = {  # a map of 4 x 4, padded to windows of 3 x 3 in its first block
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 48, "image_size": 16,
    "patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "output_channels": 8, "initializer_range": 0.02,
}  # fmt: skip
HEARD: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "conv_dim": (32, 32),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "vocab_size": 264, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 16, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 259,
    "decoder_start_token_id": 256,
}  # fmt: skip
SPOKEN: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": 259, "decoder_start_token_id": 256, "max_text_positions": 64,
    "max_speech_positions": 64, "speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16,
    **{name: HEARD[name] for name in HEARD if "conv" in name},
}  # fmt: skip
WRITER: dict[str, Any] = {"vocab_size": 264, "is_decoder": True, "add_cross_attention": True}
TEXT: dict[str, Any] = {name: SMALL[name] for name in SMALL if name not in ("image_size", "patch_size")}
TROCR: dict[str, Any] = {
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "max_position_embeddings": 64, "cross_attention_hidden_size": 32,
}  # fmt: skip
MOONSHINE: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 36, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
}  # fmt: skip
STARTS: dict[str, Any] = {"decoder_start_token_id": 256, "pad_token_id": 259}


def picture(channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, channels, 16, 16, generator=torch.Generator().manual_seed(3))}


def video() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 4, 3, 16, 16)}


def patches() -> dict[str, Tensor]:
    mask, shape = torch.ones(1, 16, dtype=torch.long), torch.tensor([[4, 4]])
    return {"pixel_values": torch.randn(1, 16, 48), "pixel_attention_mask": mask, "spatial_shapes": shape}


CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "vit": (lambda: t.ViTForImageClassification(t.ViTConfig(**SMALL)), picture),
    "deit": (lambda: t.DeiTModel(t.DeiTConfig(**SMALL)), picture),
    "dinov2": (lambda: t.Dinov2Model(t.Dinov2Config(**SMALL)), picture),
    "dinov3_vit": (lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**SMALL, num_register_tokens=2)), picture),
    "ijepa": (lambda: t.IJepaModel(t.IJepaConfig(**SMALL)), picture),
    "beit": (lambda: t.BeitModel(t.BeitConfig(**SMALL)), picture),
    "clip_vision_model": (lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**SMALL)), picture),
    "siglip_vision_model": (lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**SMALL)), picture),
    "siglip2_vision_model": (
        lambda: t.Siglip2VisionModel(
            t.Siglip2VisionConfig(**{k: v for k, v in SMALL.items() if k != "image_size"}, num_patches=16)
        ),
        patches,
    ),
    "videomae": (lambda: t.VideoMAEModel(t.VideoMAEConfig(**SMALL, num_frames=4)), video),
    "swin": (lambda: t.SwinForImageClassification(t.SwinConfig(**WINDOWS)), picture),
    "swinv2": (lambda: t.Swinv2Model(t.Swinv2Config(**WINDOWS)), picture),
    "sam": (lambda: t.SamVisionModel(t.SamVisionConfig(**MAP, attn_implementation="eager")), picture),
    "whisper": (
        lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(**WHISPER)),
        lambda: {"input_features": torch.randn(1, 8, 32)},
    ),
    "moonshine": (
        lambda: t.MoonshineForConditionalGeneration(t.MoonshineConfig(**MOONSHINE, **STARTS)),
        lambda: {"input_values": torch.randn(1, 2000)},
    ),
    "speecht5": (
        lambda: t.SpeechT5ForSpeechToText(t.SpeechT5Config(**SPOKEN)),
        lambda: {"input_values": torch.randn(1, 200)},
    ),
    "speech of two models": (
        lambda: t.SpeechEncoderDecoderModel(
            t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
                t.Wav2Vec2Config(**HEARD), t.BertConfig(**TEXT, **WRITER), **STARTS
            )
        ),
        lambda: {"input_values": torch.randn(1, 200)},
    ),
    "pictures of two models": (
        lambda: t.VisionEncoderDecoderModel(
            t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
                t.DeiTConfig(**SMALL), t.TrOCRConfig(**TROCR, **WRITER), **STARTS
            )
        ),
        picture,
    ),
    "wav2vec2": (lambda: t.Wav2Vec2ForCTC(t.Wav2Vec2Config(**HEARD)), lambda: {"input_values": torch.randn(1, 200)}),
    "hubert": (lambda: t.HubertModel(t.HubertConfig(**HEARD)), lambda: {"input_values": torch.randn(1, 200)}),
}


def build(name: str) -> Any:
    """A tiny model whose biases, gains and tokens are random, so that none of them is hidden by a zero."""
    torch.manual_seed(11)
    model = CASES[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def written(inputs: Iterable[Mapping[str, Tensor]], folder: Path) -> list[str]:
    """Files of --inputs, one for each."""
    found = []
    for k, one in enumerate(inputs):
        found.append(str(folder / f"{k}.safetensors"))
        save_file(dict(one), found[-1])
    return found
