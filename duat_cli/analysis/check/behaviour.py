"""The model's predictions on the prompts, from passes that run anyway: its own head applied to its stack's output.

A masked language model predicts nothing at a token that it sees, so its prompts run again with some tokens masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.check.tally import Tally, unigram
from duat_cli.analysis.lora.applied import adapted
from duat_cli.analysis.opening import Found
from duat_cli.analysis.prune.terms.damage import hidden_states
from duat_cli.analysis.session import Session
from duat_cli.analysis.stacks import given_logits
from duat_cli.checks.answers import Answers, every
from duat_cli.checks.sketch import Sketch
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.pieces import byte_count
from duat_cli.loading.prompts import Prompt, Spans
from duat_cli.models.discovery.causality import (
    HeadTest,
    head_logits,
    head_of,
    head_output,
    why_no_classes,
)
from duat_cli.models.discovery.modality import placed_tensors, stack_of
from duat_cli.models.discovery.structure import Discovery
from duat_cli.models.sweep.lockstep import Call, Guest, forwards
from duat_cli.results.base import finite
from duat_cli.results.behaviour import CLASSES, NOT_FINITE, Behaviour, Predicts, TunedBehaviour
from duat_cli.statistics.divergence import by_tokens

EVERY = 7  # a masked language model is asked at every seventh token, about the share masked in training
_NUMBERS = (
    "scored_bytes", "vocabulary", "loss_per_token", "loss_per_byte", "uniform", "unigram", "entropy", "largest_logit",
    "logit_range", "never_predicted", "nonfinite_logits",
)  # fmt: skip
_NO_HEAD = "the model has no head over its tokens"
_NO_DECODER = "only the encoder is run, not the decoder and its head"
_NOT_ASKED = "not only token ids are read, and what is said of them is not asked for"
_NO_LABELS = "the prompts' own classes are not known"
_NO_MASK = "the tokenizer has no mask token, without which a masked language model cannot be asked"


@dataclass(frozen=True)
class Question:
    """A question to a model: `ids`, (1, N), with predictions taken at the positions `at`.

    targets: the true tokens for the first of these positions.
    """

    ids: Tensor
    at: Sequence[int]
    targets: Sequence[int]
    bytes: int | None
    """UTF-8 bytes of the targets' text; None where it is not known."""


@dataclass
class Answer:
    """The model's answer to one prompt."""

    question: Question
    tally: Tally
    embedding: Tensor | None = None
    """Embedding of the prompt, from `_embedding`."""


class Asking:
    """Asks the model beside the sweep of `inspect` (its `Beside`); `found` has the results afterwards."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of a masked language model, for its mask token."""
        self._tokenizer = tokenizer
        self._head: HeadTest | None = None
        self.predicts: Predicts | None = None
        self.questions: list[Question] = []
        self._tally, self._embeddings = Tally(), list[list[float]]()
        self._why_none = _NO_HEAD
        self._later: list[Call] = []  # passes that run once all prompts are through

    # -- with the sweep ----------------------------------------------------------------------------------------

    def guest_of(self, session: Session) -> Callable[[Discovery], Guest]:
        """Passes that find out beside discovery whether there is a head, where weights are read block by block."""

        def begin(found: Discovery) -> Guest:
            if session.loaded.like is not None:
                return Guest()
            self._head = HeadTest(session.loaded.model, found.stack, session.loaded.device)
            return Guest(self._head.passes)

        return begin

    def ended(self, session: Session, prompt: Prompt, output: Any) -> Answer:
        """The answer to a prompt from the stack's output: predictions of the head, and the embedding for models without
        one and for classifiers."""
        model = session.loaded.model
        stack = stack_of(model)
        given = _given_logits(session.loaded, prompt, output)
        if self.predicts is None and session.loaded.like is not None:
            self.predicts = _kind_given(session.loaded, given)
            self._why_none = why_no_classes(model) or _NOT_ASKED
        elif self.predicts is None:
            self.predicts = self._kind(self._head or head_of(model, stack), model)
        # Where weights are read block by block, all answers wait for the last block, so they share `likely`.
        likely, classes = None if session.weights is None else self._tally.likely, self.predicts in CLASSES
        answer = Answer(self._question(prompt), Tally(likely, classes=classes))
        question, device = answer.question, session.loaded.device
        if classes or self.predicts == "embedding":
            try:
                answer.embedding = _embedding(hidden_states(output, stack))
            except UnsupportedModelError:
                if not classes:  # some classifiers (CLIP's, timm's) give classes alone
                    raise
        if given is not None:
            answer.tally.add(given, question.targets)
        elif classes or self.predicts == "next token":
            for start, logits in head_logits(model, stack, output, question.ids.to(device)):
                answer.tally.add(logits, question.targets[start : start + len(logits)])
        elif question.at:
            masked = Call(functools.partial(_masked, model, answer, device))
            if session.weights is None:
                session.together([masked])
            else:
                self._later.append(masked)
        return answer

    def swept(self, session: Session) -> None:
        """Runs the passes with masked tokens side by side, where weights are read block by block."""
        if self._later:
            session.together(self._later)

    def take(self, answer: Answer) -> None:
        """Takes the answer of the next prompt."""
        if answer.embedding is not None:
            self._embeddings.append(_sketched(answer.embedding, len(self.questions)))
        self.questions.append(answer.question)
        self._tally.include(answer.tally)

    def _kind(self, head: HeadTest, model: Any) -> Predicts:
        if not head.exists:
            if head.classes is not None:
                return "class" if head.classes == "text" else "token class"
            self._why_none = _NO_DECODER if model.config.is_encoder_decoder else _why_unasked(model)
            return "embedding"
        if head.causal:
            return "next token"
        if getattr(self._tokenizer, "mask_token_id", None) is not None:
            return "masked token"
        if not head.finite:  # whether it is causal is not known; either way counts the values that are not finite
            return "next token"
        self._why_none = _NO_MASK
        return "embedding"

    def _question(self, prompt: Prompt) -> Question:
        ids = prompt.input_ids
        row: list[int] = ids[0].tolist()
        if self.predicts == "next token":
            return Question(
                ids, range(len(row)), row[1:], _bytes(prompt, range(1, len(row)), self._tokenizer, together=True)
            )
        if self.predicts == "embedding" or self.predicts in CLASSES:
            return Question(ids, (), (), None)
        special = set(self._tokenizer.all_special_ids)
        at = [place for place in range(1, len(row), EVERY) if row[place] not in special]
        hidden = ids.clone()
        hidden[0, at] = int(self._tokenizer.mask_token_id)
        return Question(hidden, at, [row[place] for place in at], _bytes(prompt, at, self._tokenizer, together=False))

    # -- what was found ----------------------------------------------------------------------------------------

    def found(self, tuned: TunedBehaviour | None) -> tuple[Behaviour, Answers]:
        """The results, for the report and for a baseline."""
        assert self.predicts is not None
        tally = self._tally
        values, reasons = self._numbers()
        compared = ("agreement", "near_ties", "kl", "cosine", "cosine_error")
        reasons |= dict.fromkeys(compared, "no --baseline was given")
        if tuned is None:
            reasons["tuned"] = "no --adapter was given"
        behaviour = Behaviour(
            predicts=self.predicts,
            predictions=len(tally.tokens),
            scored=len(tally.targets),
            tuned=tuned,
            reasons=reasons,
            **values,
            **dict.fromkeys(compared),
        )
        step = every(len(tally.tokens), tally.vocabulary if tally.probabilities else 1)
        return behaviour, Answers(
            predicts=self.predicts,
            tokens=tally.tokens[::step],
            margins=[float(f"{margin:.2g}") for margin in tally.margins[::step]],
            probabilities=[_short(row) for row in tally.probabilities[::step]],
            embeddings=self._embeddings,
        )

    def _numbers(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Every number of the predictions, and the reasons of those that are null."""
        tally = self._tally
        if not tally.tokens:
            why = self._why_none if self.predicts == "embedding" else "no token of the prompts can be asked for"
            return dict.fromkeys(_NUMBERS), dict.fromkeys(_NUMBERS, why)
        loss, scored = tally.loss, len(tally.targets)
        sizes = [question.bytes for question in self.questions]
        size = None if None in sizes else sum(filter(None, sizes))
        values: dict[str, Any] = {
            "scored_bytes": size,
            "vocabulary": tally.vocabulary,
            "loss_per_token": finite(loss) if scored else None,
            "loss_per_byte": finite(loss * scored / size) if scored and size else None,
            "uniform": math.log(tally.vocabulary),
            "unigram": unigram(tally.targets, tally.vocabulary) if scored else None,
            "entropy": finite(math.fsum(tally.entropies) / len(tally.entropies)),
            "largest_logit": tally.largest,
            "logit_range": finite(math.fsum(tally.ranges) / len(tally.ranges)),
            "never_predicted": tally.never,
            "nonfinite_logits": tally.nonfinite,
        }
        why_no_loss = _NO_LABELS if self.predicts in CLASSES else "no prompt has a second token"
        if scored:
            why_no_loss = "logits are not finite" if tally.nonfinite else "a token of the prompts has probability 0"
        reasons = dict.fromkeys(_NUMBERS, "logits are not finite")
        reasons |= dict.fromkeys(("loss_per_token", "loss_per_byte", "unigram"), why_no_loss)
        if size is None:
            why = _NO_LABELS if self.predicts in CLASSES else "the tokenizer does not say"
            reasons |= dict.fromkeys(("scored_bytes", "loss_per_byte"), why)
        elif size == 0 and scored and finite(loss) is not None:
            reasons["loss_per_byte"] = "the scored tokens stand for no text"
        return values, {name: why for name, why in reasons.items() if values[name] is None}


def _given_logits(loaded: LoadedModel, prompt: Prompt, output: Any) -> Tensor | None:
    """`given_logits` of a prompt; None for a text."""
    if prompt.prepared is None:
        return None
    return given_logits(loaded, output, placed_tensors(prompt.prepared, loaded.device, loaded.model.dtype))


def _kind_given(loaded: LoadedModel, logits: Tensor | None) -> Predicts:
    """The kind of predictions that `_given_logits` returned."""
    if logits is None:
        return "embedding"
    if loaded.pair is not None:
        return "next token"
    return "token class" if type(loaded.model).__name__.endswith("ForTokenClassification") else "class"


def _why_unasked(model: Any) -> str:
    """Why a model gives no distribution that can be asked for; some have a head for answers or choices."""
    other = None if model.base_model is model else f"what the head of {type(model).__name__} gives is not read"
    return why_no_classes(model) or other or _NO_HEAD


def _short(row: Sequence[float]) -> list[float]:
    """Probabilities to six digits; empty where they are not finite."""
    return [float(f"{p:.6g}") for p in row] if all(map(math.isfinite, row)) else []


def _masked(model: Any, answer: Answer, device: str) -> None:
    """Runs a prompt with masked tokens, and adds the logits there, (masked, V), to the answer's tally."""
    question = answer.question
    answer.tally.add(head_output(model, question.ids.to(device))[0][list(question.at)], question.targets)


def _embedding(hidden: Tensor) -> Tensor:
    """Embedding of a prompt, (M,), of length 1: the mean over its tokens of the last hidden states, (1, N, M)."""
    mean = hidden[0].double().mean(dim=0)
    size = float(mean.norm())
    return (mean / size if size else mean).cpu()


def _sketched(embedding: Tensor, number: int) -> list[float]:
    """The sketch of a prompt's embedding."""
    sketch = Sketch()
    sketch.add(sketch.products(embedding[None].numpy(), number, 0), number)
    return [round(float(value), 6) + 0.0 for value in sketch.sums]


def _bytes(prompt: Prompt, at: Sequence[int], tokenizer: Any, *, together: bool) -> int | None:
    """UTF-8 bytes of the text of these tokens; None where their spans are not known. together: count from the first to
    the last as one piece, so that no byte counts twice. A token of some bytes of a character counts as these bytes."""
    if prompt.spans is None:
        return None
    places = [place for place in at if prompt.spans[place][1] > prompt.spans[place][0]]
    if not together:
        return sum(_token_bytes(prompt, prompt.spans, place, tokenizer) for place in places)
    if not places:
        return 0
    spans = [prompt.spans[place] for place in places]
    first, last = min(first for first, _ in spans), max(last for _, last in spans)
    begin, end = prompt.spans[at[0] - 1]  # the token in front, which is not predicted
    own = byte_count(tokenizer, int(prompt.input_ids[0, at[0] - 1])) if begin <= first < end else None
    shared = 0 if own is None else max(0, own - _text_bytes(prompt, begin, first))
    return _text_bytes(prompt, first, last) - shared


def _token_bytes(prompt: Prompt, spans: Spans, place: int, tokenizer: Any) -> int:
    """Bytes of one token: its own where it shares a character with a neighbour, else those of its text."""
    first, last = spans[place]
    beside = (*spans[max(0, place - 1) : place], *spans[place + 1 : place + 2])
    shares = any(start < last and first < stop for start, stop in beside)
    own = byte_count(tokenizer, int(prompt.input_ids[0, place])) if shares else None
    return _text_bytes(prompt, first, last) if own is None else own


def _text_bytes(prompt: Prompt, first: int, last: int) -> int:
    return len(prompt.text[first:last].encode())


# -- the same questions to the model with an adapter ------------------------------------------------------------


def tuned_behaviour(adapter: AdapterFiles, found: Found, loaded: LoadedModel, asking: Asking) -> TunedBehaviour:
    """Behaviour of the base `loaded` with that adapter, on the questions of `asking`."""
    asked = [question for question in asking.questions if question.targets]
    if not asked:
        return TunedBehaviour.absent("the model predicts no tokens")
    try:
        with adapted(loaded, adapter, BaseWeights(found.place, found.files)) as tuned:
            calls = [functools.partial(_losses, tuned.model, question, tuned.device) for question in asked]
            parts = forwards(None if tuned.paged is None else tuned.paged.pager, calls)
    except UnsupportedModelError as fault:
        return TunedBehaviour.absent(str(fault))
    losses = [loss for part in parts for loss in part]
    mean = math.fsum(losses) / len(losses)
    return TunedBehaviour.explained(NOT_FINITE, loss_per_token=finite(mean))


def _losses(model: Any, question: Question, device: str) -> list[float]:
    """Loss of every target, in nats."""
    logits: Tensor = head_output(model, question.ids.to(device))[0][list(question.at)[: len(question.targets)]]
    targets = torch.tensor(question.targets, device=logits.device).split(len(by_tokens(logits)[0]))
    found: list[float] = []
    for piece, target in zip(by_tokens(logits), targets, strict=True):
        found += torch.nn.functional.cross_entropy(piece.double(), target, reduction="none").tolist()
    return found
