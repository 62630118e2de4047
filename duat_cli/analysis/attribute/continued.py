"""Continuations of prompts: greedy or given tokens, attributed in one pass over all of them.

In a causal model, later tokens do not change the output at a token, so that every token of a continuation is one more
position of a longer prompt. Still, a model may compute differently by the length of the text; so the logits of passes
that end at a token are kept, and the pass over all tokens is compared with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duat_cli.analysis.attribute.work import Prediction
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.errors import InputError
from duat_cli.loading.prompts import Prompt, limits
from duat_cli.loading.words import Words
from duat_cli.models.discovery.causality import head_of
from duat_cli.models.sweep.lockstep import forwards
from duat_cli.results.attribute import Attribution, Continuation, Source, TokenName


@dataclass(frozen=True)
class Continued:
    """A prompt with its continuation."""

    prompt: Prompt  # including the continuation
    count: int = 0  # tokens of the continuation
    alone: Tensor | None = None  # logits of passes that end just before its first tokens, (passes, vocabulary)


def continued(
    session: Session,
    prompts: Sequence[tuple[int, Prompt]],
    steps: int,
    given: Callable[[Prompt, str], tuple[list[int], list[int]]],
    progress: Progress,
) -> list[Continued]:
    """Every prompt followed by `steps` greedy tokens, or by given ones if `steps` is 0.

    prompts: with their numbers; given: takes a prompt and its name in errors, and returns its own tokens and those of
    its continuation.
    """
    option = "--steps" if steps else "--continuation"
    reason = head_of(session.loaded.model, session.structure.stack).why_no_next_token()
    if reason is not None:
        raise InputError(f"{option}: {reason}")
    own = [p.input_ids[0].tolist() for _, p in prompts]
    parts = [(ids, [0] * steps) for ids in own] if steps else [given(p, f"prompt {k + 1}") for k, p in prompts]
    room = limits(session.loaded.model)
    for (k, _), (front, behind) in zip(prompts, parts, strict=True):
        if room.max_positions is not None and (tokens := len(front) + len(behind)) > room.max_positions:
            raise InputError(
                f"{option}: prompt {k + 1} would have {tokens} tokens, the model has {room.max_positions} "
                f"positions{room.why}"
            )
    ids = [torch.tensor([front], device=session.loaded.device) for front, _ in parts]
    rows: list[list[Tensor]] = []
    for step in range(max(1, steps)):
        progress(step, max(1, steps), "the greedy tokens" if steps else "what follows the prompts")
        rows.append(forwards(session.weights, [functools.partial(_last, session, one) for one in ids]))
        if steps:
            ids = [torch.cat([one, row.argmax()[None, None]], dim=1) for one, row in zip(ids, rows[-1], strict=True)]
    if not steps:
        ids = [torch.tensor([[*front, *behind]]) for front, behind in parts]
    return [
        Continued(replace(p, input_ids=one.cpu()), len(behind), torch.stack(alone))
        for (_, p), (_, behind), one, alone in zip(prompts, parts, ids, zip(*rows, strict=True), strict=True)
    ]


def _last(session: Session, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return Prediction(session.loaded.model, ids)()[0, -1]


def summed(
    number: int,
    found: Sequence[Attribution],
    ids: Sequence[int],
    words: Words,
    likelihood: Sequence[tuple[float, float]],
) -> Continuation:
    """Sums over the tokens of one prompt's continuation.

    likelihood: for each token its log-probability and the error of the linearised one; empty for greedy tokens.
    """
    names = [one.target.token for one in found if one.target.token is not None]
    sources = [0.0] * (len(ids) - 1)
    for one in found:
        for token in one.parts.tokens[: len(sources)]:
            sources[token.position] += token.value
        for unit in one.parts.units:
            for place, value in enumerate((unit.tokens or [])[: len(sources)]):
                sources[place] += value
    return Continuation.explained(
        "the logits of greedy tokens are attributed, not their log-probabilities",
        prompt=number,
        tokens=[TokenName(id=name.id, text=name.text) for name in names],
        logits=sum(one.logit for one in found),
        log_probability=sum(p for p, _ in likelihood) if likelihood else None,
        first_order_error=sum(error for _, error in likelihood) if likelihood else None,
        sources=[
            Source(position=place, text=words.text(token), value=value)
            for place, (token, value) in enumerate(zip(ids[:-1], sources, strict=True))
        ],
    )
