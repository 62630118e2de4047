"""The model's own head on what its stack has put out already: logits without a second pass through the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.instrument.calls import taken_by
from duat_cli.models.instrument.hooks import patched

LOGITS_BYTES = 256 << 20  # of the logits that are in memory at once, where the model can give some tokens' alone


def head_logits(model: Any, stack: Any, output: Any, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first token, logits (tokens, vocabulary)) of the prompt `ids`, (1, N), in pieces.

    output: what `stack` gave for the prompt. The model's own forward runs, and takes it in place of a pass of the
    stack; a model that runs its blocks without that module's call runs them again, for the same numbers.
    """
    tokens = ids.shape[1]
    step = _tokens_at_once(model, tokens)
    with patched(stack, lambda *_call: output):
        for start in range(0, tokens, step):
            with torch.no_grad():
                found = _logits(model, ids, start, min(start + step, tokens), tokens)
            yield start, found


def _tokens_at_once(model: Any, tokens: int) -> int:
    if "logits_to_keep" not in taken_by(model.forward):
        return tokens
    width = model.get_output_embeddings().weight.shape[0] * model.dtype.itemsize
    return int(max(1, min(tokens, LOGITS_BYTES // width)))


def _logits(model: Any, ids: Tensor, start: int, stop: int, tokens: int) -> Tensor:
    if (start, stop) == (0, tokens):
        found: Tensor = run_stack(model, ids).logits[0]
        return found
    kept = torch.arange(start, stop, device=ids.device)
    some: Tensor = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=kept
    ).logits[0]
    return some
