"""Checkpoints of real shapes with random weights, written a block at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import DEMO

VOCABULARY = 32000


@dataclass(frozen=True)
class Shape:
    """A llama."""

    hidden: int
    inner: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int = VOCABULARY


SHAPES = {
    "135M": Shape(576, 1536, 30, 9, 3),
    "1.1B": Shape(2048, 5632, 22, 32, 4),
    "7B": Shape(4096, 11008, 32, 32, 32),
    "8B": Shape(4096, 14336, 32, 32, 8, 128256),
    "70B": Shape(8192, 28672, 80, 64, 8, 128256),
}


def write(folder: Path, shape: Shape) -> None:
    """A folder as save_pretrained makes it, bfloat16, one shard a block; with the demo's tokenizer, of fewer tokens."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.blocks, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder)
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(1 << 24, generator=generator) * 0.02).to(torch.bfloat16)  # drawn from again and again: quick
    drawn = 0

    def matrix(rows: int, columns: int) -> torch.Tensor:
        nonlocal drawn
        drawn = (drawn + 7919) % (1 << 20)
        count = rows * columns
        return pool[drawn:].repeat(count // (len(pool) - drawn) + 1)[:count].reshape(rows, columns)

    def gain() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(shape.hidden, generator=generator)).to(torch.bfloat16)

    index: dict[str, str] = {}

    def shard(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    hidden, narrow = shape.hidden, shape.kv_heads * shape.hidden // shape.heads
    outer = {name: matrix(shape.vocabulary, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shard(0, outer | {"model.norm.weight": gain()})
    for block in range(shape.blocks):
        tensors = {
            "self_attn.q_proj.weight": matrix(hidden, hidden),
            "self_attn.k_proj.weight": matrix(narrow, hidden),
            "self_attn.v_proj.weight": matrix(narrow, hidden),
            "self_attn.o_proj.weight": matrix(hidden, hidden),
            "mlp.gate_proj.weight": matrix(shape.inner, hidden),
            "mlp.up_proj.weight": matrix(shape.inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, shape.inner),
            "input_layernorm.weight": gain(),
            "post_attention_layernorm.weight": gain(),
        }
        shard(block + 1, {f"model.layers.{block}.{name}": tensor for name, tensor in tensors.items()})
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
