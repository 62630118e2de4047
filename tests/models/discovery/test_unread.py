"""What a report leaves unread has a name: image towers, cross-attention without states, blocks never called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import single_model
from own_code import WIDTH, Attention, Block, OwnConfig, OwnStack, own
from torch import Tensor, nn

from duat_cli.analysis.support import entry_of_type
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover
from duat_cli.models.discovery.unread import ENCODER_ALONE, unread_attention
from duat_cli.zoo import tiny

NOT_READ = "holds attention and was not read: it does not run on token ids alone"


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("llava", [f"vision_tower (CLIPVisionModel) {NOT_READ}"]),
        ("gemma3", [f"model.vision_tower (SiglipVisionModel) {NOT_READ}"]),
        ("video_llava", [f"video_tower (CLIPVisionModel) {NOT_READ}", f"image_tower (CLIPVisionModel) {NOT_READ}"]),
        (
            "blip_text_model",
            [
                "encoder.layer.0.crossattention, encoder.layer.1.crossattention, encoder.layer.2.crossattention "
                f"(BlipTextAttention) {NOT_READ}"
            ],
        ),
        (
            "bart",
            [f"{ENCODER_ALONE}; inspect, verify, attribute, prune-bound, lora-diff and check take --stack decoder"],
        ),
        ("llama", []),
        ("bert", []),
        ("albert", []),
    ],
)
def test_the_parts_that_are_not_read(model_type: str, parts: list[str]) -> None:
    built = tiny.build(model_type)
    assert isinstance(built, tiny.TinyModel), built
    assert list(discover(built.model).uncovered) == parts


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("siglip_vision_model", "head.attention (MultiheadAttention)"),
        ("aimv2_vision_model", "head (Aimv2AttentionPoolingHead)"),
    ],
)
def test_attention_behind_the_last_block_is_named(model_type: str, module: str) -> None:
    """It pools what the blocks put out, and is part of none of them."""
    entry = entry_of_type(model_type)
    assert (entry.status, entry.parts) == ("partly", [f"{module} attends to what the blocks put out and was not read"])


class Pooling(OwnStack):
    """Attends to what the blocks put out; a list of plain layers comes behind it."""

    def __init__(self, config: OwnConfig, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(config, block)
        self.pool, self.head = Attention(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def through(self, x: Tensor) -> Tensor:
        x = self.pool(super().through(x))
        for layer in self.head:
            x = layer(x)
        return x


class Between(Pooling):
    """Attends in front of the blocks as well."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(self.pool(x))


def test_a_list_of_plain_layers_behind_that_attention_is_no_list_of_blocks() -> None:
    said = "pool (Attention) attends to what the blocks put out and was not read"
    assert said in discover(own(stack=Pooling)).uncovered
    with pytest.raises(UnsupportedModelError, match="attention runs outside any list of blocks: Attention"):
        discover(own(stack=Between))


def test_blocks_that_no_forward_pass_calls() -> None:
    model = single_model("llama")
    model.spare = nn.ModuleList([single_model("llama").model.layers[k] for k in range(3)])
    model.mixer = nn.MultiheadAttention(8, 2)
    model.head = nn.Linear(8, 8)
    assert [note.replace(NOT_READ, "").strip() for note in discover(model).uncovered] == [
        "spare (ModuleList)",
        "mixer (MultiheadAttention)",
    ]


def test_attention_without_the_word_in_its_name() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q_proj(x) @ self.k_proj(x).mT

    model = single_model("llama")
    model.other = Mixer()
    assert unread_attention(model, list(model.model.modules())) == [f"other (Mixer) {NOT_READ}"]
    assert unread_attention(model, list(model.modules())) == []


def test_support_says_partly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(libraries, "calm", lambda talk: None)
    tiny.tiny_model("llava").save_pretrained(tmp_path)
    capsys.readouterr()
    assert run(["support", str(tmp_path), "-q", "--json"]) == 1
    [entry] = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["status"], entry["reason"]) == ("partly", None)
    assert "vision_tower" in " ".join(entry["parts"])
