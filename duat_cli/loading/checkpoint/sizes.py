"""Names of the fields in which config.json states the sizes of a model, over all architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duat_cli.compat.transformers import largest_stated

# not hidden_dim, which is the width of DistilBERT's FFN, whose `dim` may be left to the class
WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads")
HEAD_WIDTH = ("head_dim", "d_kv", "kv_channels", "attention_head_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
STREAMS = ("hc_mult", "hc_count", "altup_num_inputs")
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TEXT = ("text_config", "decoder", "llm_config")  # where a config of several models has the text model's


def streams_of(config: Any) -> int:
    """How many streams a token has between blocks, by a config of transformers."""
    return max(largest_stated(config, name) or 1 for name in STREAMS)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model, in a config of several models; else the config itself. A decoder's config that
    states no hidden size is passed over where the outer config states one: FSMT keeps a vocabulary there."""
    found = next((found for name in _TEXT if isinstance(found := config.get(name), dict)), config)
    return config if found is config.get("decoder") and _has_width(config) and not _has_width(found) else found


def _has_width(config: Mapping[str, Any]) -> bool:
    return any(name in config for name in WIDTH)
