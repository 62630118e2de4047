"""Tiny classifiers: of a text by its first token or by its last, and of each token."""

from __future__ import annotations

from typing import Any

import transformers

from duat_cli.zoo import tiny

SHAPE = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
KINDS = {
    "text": ("Bert", "ForSequenceClassification", {"max_position_embeddings": 32}),
    "token": ("Bert", "ForTokenClassification", {"max_position_embeddings": 32}),
    "last": ("Llama", "ForSequenceClassification", {"num_key_value_heads": 2, "pad_token_id": None}),
}
LABELS = {0: "bad", 1: "so", 2: "good"}


def classifier(kind: str, **fields: Any) -> Any:
    """In float32. kind: of `KINDS`; fields: of its config, three labels without."""
    family, what, own = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**SHAPE | own | {"id2label": LABELS} | fields)
    model = getattr(transformers, f"{family}{what}")._from_config(config, attn_implementation="eager").eval()
    tiny.randomise(model, 1)
    return model
