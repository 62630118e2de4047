"""Change of a model's prediction on one prompt, from base to tuned model: KL and losses of its tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duat_cli.loading.prompts import Prompt
from duat_cli.results.base import finite
from duat_cli.results.lora import AnswerChange, PromptChange, TokenChange
from duat_cli.statistics.divergence import kl, mean_loss
from duat_cli.statistics.ranking import largest

MOVED_TOKENS = 5
ONE_TOKEN = "needs a second token"
IMPOSSIBLE = "infinite or NaN: a token of the prompt has probability 0"
NO_ANSWER = "it is no conversation in which the model itself says something"
NOT_SEEN = "which tokens the model itself says is not known: the template or the tokenizer does not show it"

Decode = Callable[[int], str]


def prompt_change(
    number: int,
    prompt: Prompt,
    output: float,
    logits: tuple[Tensor, Tensor] | str,
    decode: Decode,
    order: list[int] | str | None,
    why_no_loss: str | None,
) -> PromptChange:
    """Change of one prompt's prediction. order: where the logits are over classes, as `Labels.order_in` returns it.
    why_no_loss: why no prompt has a loss; None where they have one."""
    if isinstance(logits, str):
        return PromptChange.absent(logits, prompt=number, output=output, moved_tokens=[])
    ids = prompt.input_ids[0]
    each, why_no_kl = _divergence(*logits, order)
    worded = [place for place in range(len(ids)) if place not in prompt.pieces]
    places = torch.tensor([place for place in worded if place > 0], dtype=torch.int64)
    losses = [None if why_no_loss else _loss(one, ids, places) for one in logits]
    why = why_no_loss or (IMPOSSIBLE if len(places) else ONE_TOKEN)
    reasons = {name: why for name, loss in zip(("loss_base", "loss_tuned"), losses, strict=True) if loss is None}
    answer = None if why_no_loss else _answer(prompt, logits, each, why_no_kl)
    if answer is None:
        reasons["answer"] = NOT_SEEN if prompt.answered is None else NO_ANSWER
    rows, moved = each, list[tuple[int, float]]()
    if each is not None and len(each) == len(ids):
        rows = each[worded]
        moved = [(worded[i], float(rows[i])) for i in largest(rows, MOVED_TOKENS)]
    return PromptChange(
        prompt=number,
        output=output,
        kl=None if rows is None else float(rows.mean()),
        loss_base=losses[0],
        loss_tuned=losses[1],
        answer=answer,
        moved_tokens=[TokenChange(position=i, text=decode(int(ids[i])), kl=nats) for i, nats in moved],
        reasons=reasons if why_no_kl is None else {**reasons, "kl": why_no_kl},
    )


def _answer(
    prompt: Prompt, logits: tuple[Tensor, Tensor], each: Tensor | None, why_no_kl: str | None
) -> AnswerChange | None:
    """Change on the model's own messages; None where it has no token there with another in front of it. each: as
    `_divergence` returns it."""
    places = torch.tensor([place for place in prompt.answered or () if place > 0])
    if not len(places):
        return None
    base, tuned = (_loss(one, prompt.input_ids[0], places) for one in logits)
    return AnswerChange.explained(
        IMPOSSIBLE,
        {} if why_no_kl is None else {"kl": why_no_kl},
        tokens=len(places),
        kl=None if each is None else float(each[places - 1].mean()),
        loss_base=base,
        loss_tuned=tuned,
    )


def _divergence(p: Tensor, q: Tensor, order: list[int] | str | None) -> tuple[Tensor | None, str | None]:
    """KL of each row, nats, (N,) float64 on the CPU; or None and why. order: as for `_prompt`."""
    what = "tokens" if order is None else "classes"
    if p.shape[1] != q.shape[1]:
        return None, f"the models predict {p.shape[1]} and {q.shape[1]} {what}"
    if isinstance(order, str):
        return None, order
    each = kl(p, q if order is None else q[:, order]).cpu()
    if bool(each.isnan().any()):
        return None, "the logits hold NaN"
    if bool(each.isinf().any()):
        return None, f"infinite: the tuned model gives probability 0 to one of the {what} to which the base does not"
    return each, None


def _loss(logits: Tensor, ids: Tensor, places: Tensor) -> float | None:
    """Mean negative log likelihood, in nats, of the tokens at these places, each at least 1; None if it is not finite
    or there are none."""
    if not len(places):
        return None
    return finite(mean_loss(logits[places - 1], ids[places]))
