"""Whether a model predicts the next token: by what it does, because a class name does not tell (`is_decoder`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duat_cli.models.arrays import relative_error, wide
from duat_cli.models.discovery.structure import DISCOVERY_TOKENS, ModelStructure, probe_ids, run_stack

KEPT = DISCOVERY_TOKENS // 2  # tokens in front of those that are changed


def has_lm_head(model: Any, structure: ModelStructure) -> bool:
    """Whether the model puts out, as `logits`, logits over its vocabulary for every token that it reads."""
    if model is structure.stack or getattr(model.config, "is_encoder_decoder", False):
        return False
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return False
    ids = probe_ids(structure.stack, DISCOVERY_TOKENS)
    with torch.no_grad():  # a class for pretraining may hold its head's output under another name
        logits = getattr(run_stack(model, ids), "logits", None)
    return isinstance(logits, Tensor) and logits.shape[:-1] == ids.shape


def is_causal(model: Any, structure: ModelStructure) -> bool:
    """Whether no token's logits depend on a later token: found by changing all tokens behind the first few.

    In a causal model the first logits stay the same but for rounding (experts compute in batches of other sizes),
    measured at most 3e-7 in float32 and 0 in bfloat16; in untrained encoders they move by 8e-4 at least.
    """
    ids = probe_ids(structure.stack, DISCOVERY_TOKENS)
    other = torch.cat([ids[:, :KEPT], ids[:, : DISCOVERY_TOKENS - KEPT]], dim=1)
    with torch.no_grad():
        before, after = (wide(run_stack(model, x).logits)[:, :KEPT] for x in (ids, other))
    return relative_error(after, before) <= max(1e-5, 0.5 * float(torch.finfo(model.dtype).eps))


def why_no_next_token(model: Any, structure: ModelStructure) -> str | None:
    """Why the model's logits are not those of the next token; None where they are."""
    name = type(model).__name__
    if not has_lm_head(model, structure):
        return f"{name} is no next-token model: it has no LM head"
    if not is_causal(model, structure):
        return f"{name} is no next-token model: its outputs move with later tokens"
    return None
