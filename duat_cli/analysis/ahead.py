"""The words of a text with pictures, and whether a word sees those behind it, as in a model that reads picture and
question at once (PaliGemma). Its output is then no prediction of the next word, so that there is no loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duat_cli.loading.inputs.within import pieces_of
from duat_cli.models.discovery.causality import LogitsPass, unmoved
from duat_cli.models.discovery.modality import Given, for_decoder


def words_of(model: Any, given: Given) -> Tensor:
    """Which tokens of a prompt are words, (N,): all but the pieces of its pictures, videos and sounds."""
    ids = (given if isinstance(given, Tensor) else given["input_ids"])[0]
    pieces = [] if isinstance(given, Tensor) else list(pieces_of(model.config))
    return ~torch.isin(ids, ids.new_tensor(pieces))


class Ahead:
    """Two passes of a text with pictures, with two last words; none for any other input."""

    def __init__(self, model: Any, given: Given) -> None:
        self._model = model
        self.passes: list[LogitsPass] = []
        if isinstance(given, Tensor) or "input_ids" not in given or for_decoder(given):
            return
        ids, words = given["input_ids"], words_of(model, given).nonzero()[:, 0]
        others = [place for place in words.tolist() if ids[0, place] != ids[0, words[-1]]]
        last = int(words[-1]) if others else 0
        if last == 0:
            return
        changed = ids.clone()
        changed[0, last] = ids[0, others[-1]]
        self.passes = [LogitsPass(model, {**given, "input_ids": one}, slice(last - 1, last)) for one in (ids, changed)]

    @property
    def why_no_loss(self) -> str | None:
        """Why there is no loss, once the passes have run; None where no word sees a later one."""
        found = [one.found for one in self.passes if one.found is not None]
        if len(found) < 2 or unmoved(found[0], found[1], self._model.dtype):
            return None
        return f"words that {type(self._model).__name__} reads with a picture see those behind them"
