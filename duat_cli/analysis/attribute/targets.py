"""Targets of attribution: one entry of the output, minus another or the mean; without a head, of hidden states. And how
probable the model finds a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from duat_cli.compat.transformers import stated
from duat_cli.errors import InputError, UnsupportedModelError, needed
from duat_cli.loading.checkpoint.sizes import EXPERTS
from duat_cli.loading.words import Labels, Named, Words
from duat_cli.models.arrays import relative_error, tolerance_for, wide
from duat_cli.models.discovery.causality import class_count
from duat_cli.text import clean

MEAN = "mean"
NORM = "norm"
Kind = Literal["token", "class", "component", "norm", "log-probability"]


@dataclass(frozen=True)
class Target:
    """One number of a model's output."""

    kind: Kind
    position: int | None  # None: the model has one output per prompt
    token: int | None  # None: the norm of the output
    given: bool
    against: int | None = None
    against_mean: bool = False
    direction: Tensor | None = None  # weights of the outputs, if the target is not one of them

    def of(self, output: Tensor) -> Tensor:
        """The target's value in an output, (1, N, vocabulary) or (1, classes), float64, with the autograd graph."""
        row = self.row(output).double()
        if self.direction is not None:
            return row @ self.direction
        found = row[needed(self.token)]
        if self.against is not None:
            found = found - row[self.against]
        return found - row.mean() if self.against_mean else found

    def after(self, output: Tensor) -> Tensor:
        """The target's value in the output of a changed model. A norm is the length of that output, not its component
        along the old direction."""
        return self.row(output).double().norm() if self.kind == "norm" else self.of(output)

    def row(self, output: Tensor) -> Tensor:
        """The outputs at the target's position, (vocabulary,)."""
        return output[0] if self.position is None else output[0, self.position]

    def rank(self, output: Tensor) -> int | None:
        """Rank of the target's token or class among all, from 1; None for other targets."""
        if self.token is None or self.kind == "component":
            return None
        row = self.row(output)
        return 1 + int((row > row[self.token]).sum())


@dataclass(frozen=True)
class Asked:
    """Options that choose the target."""

    target: str | None = None
    against: str | None = None
    position: int | Literal["all"] | None = None  # None: the first mask of a masked LM's prompt, else the last token
    first_token: bool = False


@dataclass(frozen=True)
class Odds:
    """Probabilities by softmax over all tokens, or classes."""

    own: float
    rival: int
    """The most probable other token or class."""
    rivals: float


def has_odds(model: Any, target: Target, entries: int) -> bool:
    """Whether a target has a probability in an output with so many entries: tokens do, and classes if the model has
    exactly one for each entry."""
    if target.kind == "class":
        return class_count(model) == entries
    return target.kind in ("token", "log-probability")


def odds_of(model: Any, target: Target, output: Tensor) -> Odds | None:
    """The odds of a target in an output, (1, N, vocabulary) or (1, classes), computed in float64; None without
    `has_odds`."""
    row = target.row(output)
    if target.token is None or not has_odds(model, target, len(row)):
        return None
    found = row.double().softmax(dim=-1)
    others = found.clone()
    others[target.token] = -1.0
    rival = int(others.argmax())
    return Odds(float(found[target.token]), rival, float(found[rival]))


BY_LENGTH = "the model computes otherwise by how long the text is"
_LENGTH_ROPES = "longrope", "dynamic"


def why_by_length(config: Any, dtype: torch.dtype) -> str:
    """Why logits may depend on the number of tokens in a pass, for a model with this config and dtype."""
    ropes = stated(config, "rope_parameters") or {}
    kinds = [one.get("rope_type") for one in (ropes, *ropes.values()) if isinstance(one, dict)]
    chosen = next((kind for kind in _LENGTH_ROPES if kind in kinds), None)
    if chosen is not None:
        return f"the model chooses its rotary frequencies by how long the text is (rope_type {chosen})"
    if dtype.itemsize >= 4:
        return BY_LENGTH
    name = str(dtype).removeprefix("torch.")
    if any(stated(config, field) for field in EXPERTS):
        return (
            f"passes of other lengths round otherwise in {name}, and a router that rounds sends tokens to other "
            "experts; use --dtype float32"
        )
    return f"passes of other lengths round otherwise in {name}; use --dtype float32"


class Chooser:
    """Chooses the targets of every prompt of one model."""

    def __init__(
        self, asked: Asked, words: Words, labels: Labels, *, likelihood: bool = False, by_length: str = BY_LENGTH
    ) -> None:
        """labels: of a classifier. likelihood: whether targets are the log-probabilities of continuations' tokens, not
        their logits. by_length: why logits may depend on the number of tokens, for errors."""
        self._by_length = by_length
        self._asked, self._words, self._labels, self.likelihood = asked, words, labels, likelihood
        self._each: dict[int, tuple[Named | None, Named | None]] = {}
        self._target_option, self._against_option = "--target", "--against"
        self.masked = False  # whether the output at a position predicts the token there, not the next one
        self.continued: dict[int, int] = {}
        self._alone: dict[int, Tensor | None] = {}

    def expect(
        self,
        number: int,
        *,
        target: Named | None = None,
        against: Named | None = None,
        continued: int = 0,
        alone: Tensor | None = None,
    ) -> None:
        """Sets what the prompt of that number has for itself. target, against: its own target, and what is subtracted.
        continued: how many of its last tokens are the targets. alone: as of `Continued`."""
        self._each[number] = target, against
        if continued:
            self.continued[number], self._alone[number] = continued, alone

    def of(
        self, number: int, ids: Sequence[int], output: Tensor, where: str, *, headless: bool, labelled: bool = False
    ) -> list[Target]:
        """The targets of the prompt of that number, with these token ids and this output of the model.

        where: name of the prompt, for errors. headless: whether the output is a mean of hidden states. labelled:
        whether the output at every token is over classes instead of the vocabulary.
        """
        if number in self.continued:
            first = len(ids) - self.continued[number]
            if (alone := self._alone.pop(number)) is not None:
                self._require_as_alone(alone, output[0], first - 1, where)
            return [self._following(place, output, ids[place + 1]) for place in range(first - 1, len(ids) - 1)]
        target, against = self._each.get(number, (None, None))
        if target is not None:
            self._target_option, text = target
            self._asked = replace(self._asked, target=text)
        if against is not None:
            self._against_option, text = against
            self._asked = replace(self._asked, against=text)
        if output.ndim == 2:
            self._require_none("--position", self._asked.position is not None)
            return [self._component(output) if headless else self._target("class", None, output, None, where)]
        if output.ndim != 3 or output.shape[1] != len(ids):
            raise UnsupportedModelError(
                f"the model's output has the shape {tuple(output.shape)}: one row a token, or one"
            )
        kind: Kind = "class" if labelled else "token"
        asked, mask = self._asked.position, self._words.mask
        if asked is None:
            asked = list(ids).index(mask) if mask is not None and mask in ids else -1
        if asked == "all":
            own = ids if self.masked else [*ids[1:], None]
            following = own if self._asked.target is None and not labelled else [None] * len(ids)
            return [self._target(kind, place, output, following[place], where) for place in range(len(ids))]
        if not -len(ids) <= asked < len(ids):
            raise InputError(
                f"--position {asked}: {where} has {len(ids)} tokens; expected {-len(ids)} to {len(ids) - 1}"
            )
        return [self._target(kind, asked % len(ids), output, None, where)]

    def _require_as_alone(self, alone: Tensor, output: Tensor, place: int, where: str) -> None:
        """Raises InputError where the logits at a position depend on the length of the text.

        alone: logits of passes that end at the tokens from `place` on, (passes, vocabulary). output: of the pass over
        all tokens, (N, vocabulary).
        """
        option, most = "--continuation" if self.likelihood else "--steps", tolerance_for(alone.dtype)
        for position, own in enumerate(alone, start=place):
            error = relative_error(wide(output[position]), wide(own))
            if not error <= most:
                raise InputError(
                    f"{option}: {where}: in one pass over all {len(output)} tokens the logits at position {position} "
                    f"are not those of the pass that ends there (relative error {error:.1e}, expected {most:.0e}): "
                    f"{self._by_length}; attribute each token alone, behind a prompt that ends in front of it"
                )

    def _following(self, place: int, output: Tensor, token: int) -> Target:
        """The target for a token of a continuation. The gradient of log p_t = z_t - log Σ exp z is e_t - p."""
        if not self.likelihood:
            return Target("token", place, token, True)
        direction = -output[0, place].detach().double().softmax(dim=-1)
        direction[token] += 1
        return Target("log-probability", place, token, True, direction=direction)

    def _component(self, output: Tensor) -> Target:
        """The target in a model without a head: one component of the mean of its last hidden states, or its length."""
        asked, width = self._asked.target, output.shape[-1]
        if asked is None or not (asked == NORM or (asked.isdecimal() and int(asked) < width)):
            given = "no --target" if asked is None else f"--target '{clean(asked)}'"
            raise InputError(
                f"{given}: this model has no head; expected --target with a component of the mean of its last hidden "
                f"states, 0 to {width - 1}, or {NORM}"
            )
        self._require_none("--against", self._asked.against is not None)
        if asked == NORM:
            row = output[0].detach().double()
            return Target("norm", None, None, True, direction=row / row.norm())
        return Target("component", None, int(asked), True)

    def _require_none(self, option: str, given: bool) -> None:
        if given:
            raise InputError(f"{option}: this model has one output a prompt, not one a token of a vocabulary")

    def text(self, target: Target, token: int) -> str:
        """Text of an entry of the output."""
        if target.kind in ("token", "log-probability"):
            return self._words.text(token)
        return self._labels.text(token) if target.kind == "class" else f"component {token}"

    def _target(self, kind: Kind, position: int | None, output: Tensor, following: int | None, where: str) -> Target:
        """The target at a position. following: the token to take if none is asked for; None: the model's own choice.
        where: as for `of`."""
        row = output[0] if position is None else output[0, position]
        asked = self._asked
        if asked.target is not None:
            token = self._entry(self._target_option, asked.target, kind, len(row))
        else:
            token = int(torch.argmax(row)) if following is None else following
        mean = asked.against == MEAN
        if mean and len(row) == 1:
            raise InputError("--against mean: this model has one output, which is its own mean")
        other = None
        if asked.against is not None and not mean:
            other = self._entry(self._against_option, asked.against, kind, len(row))
            if other == token:
                own = "which the model chose" if following is None else "which the text has"
                here = where if position is None else f"{where}, position {position}"
                own = "" if asked.target is not None else f", {own} in {here}; name another with --target"
                raise InputError(f"{self._against_option} '{clean(asked.against)}': that is the target itself{own}")
        given = asked.target is not None or following is not None
        return Target(kind, position, token, given, other, mean)

    def _entry(self, option: str, text: str, kind: Kind, count: int) -> int:
        if kind == "class":
            return self._labels.token(option, text, count)
        token = self._words.token(option, text, first=self._asked.first_token)
        if token >= count:
            raise InputError(f"{option} '{clean(text)}': token {token} is none of the {count} that the model puts out")
        return token


def likelihoods(output: Tensor, ids: Sequence[int], count: int) -> list[tuple[float, float]]:
    """log p and log V - H(p) of each of the last `count` tokens, from a model's output (1, N, V)."""
    found = []
    for place in range(len(ids) - count - 1, len(ids) - 1):
        logs = output[0, place].double().log_softmax(dim=-1)
        entropy = -float((logs.exp() * logs).sum())
        found.append((float(logs[ids[place + 1]]), math.log(len(logs)) - entropy))
    return found
