"""Models with code of their own, as checkpoints with `auto_map` and research code have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

WIDTH, HEADS, VOCABULARY = 24, 3, 61
PROMPTS = [[5, 9, 12, 33, 9, 12, 40, 7], [3, 3, 50, 22, 18, 4, 9]]


class OwnConfig(PretrainedConfig):
    model_type = "own_code"

    def __init__(self, vocab_size: int = VOCABULARY, hidden_size: int = WIDTH, **kwargs: Any) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class Attention(nn.Module):
    """Three heads, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 40, bias=False), nn.GELU(), nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Of the usual make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.ffn = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.ffn(self.second(x))


class OwnStack(PreTrainedModel):
    """The blocks, behind an embedding and in front of a norm."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig, block: Callable[[], nn.Module] = Block, blocks: int = 2) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.norm(self.through(self.embed(input_ids))))


class OwnModel(PreTrainedModel):
    """A stack with a head."""

    config_class = OwnConfig
    base_model_prefix = "model"

    def __init__(self, config: OwnConfig, stack: OwnStack) -> None:
        super().__init__(config)
        self.model = stack
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


def filled(model: Any) -> Any:
    """With weights by the order of the parameters: two models that have theirs in one order compute alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 1.2 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.2 * drawn)
    return model.requires_grad_(False).eval()


def own(block: Callable[[], nn.Module] = Block, stack: type[OwnStack] = OwnStack) -> OwnModel:
    """A model of two such blocks."""
    made: OwnModel = filled(OwnModel(OwnConfig(), stack(OwnConfig(), block)))
    return made
