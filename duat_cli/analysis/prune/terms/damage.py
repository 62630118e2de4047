"""Damage, measured as how far the output of a pass moved, and the probes that predict it.

A metric gives three things. `measured` is the damage of an ablated output. `probes` are Gaussian directions v in the
space of the output, scaled so that E[⟨v, δ⟩²] is the leading term of the damage of a change δ of the output; their
gradients give the responses of every term at once. `predicted` turns the squared responses back into damage.

- hidden: ‖δ‖ / ‖out‖ over all tokens; v ~ N(0, I) / ‖out‖.
- kl: mean over tokens of KL(p ‖ p'), nats. Its leading term is ½ δᵀFδ with F = diag(p) - ppᵀ, the Fisher matrix of the
  model's own next-token distribution; F = AAᵀ with A = diag(√p) - p√pᵀ, so v = A g, g ~ N(0, I), has covariance F.
  (Drawing tokens from p gives the same F with heavier tails; Gaussian responses have exact intervals.) For a classifier
  p is the distribution over its classes, for each text or for each token.
- nll: change of the mean loss, nats per token: ⟨∂loss, δ⟩ + ½ δᵀFδ, because F is the loss's Hessian in the logits.

Where pictures, videos or sounds stand within a text, kl and nll are of its words: the output at a piece of a picture
predicts no word, and no piece is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from duat_cli.analysis.ahead import words_of
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.kinds import MetricName
from duat_cli.loading.inputs.within import pieces_of
from duat_cli.models.arrays import rounding_for, wide
from duat_cli.models.discovery.causality import Classes, HeadTest, by_row, head_of, head_output
from duat_cli.models.discovery.modality import Given, by_place, is_pair
from duat_cli.models.discovery.structure import ModelStructure, run_stack
from duat_cli.models.sweep.passes import Forward
from duat_cli.statistics.chi_square import mean_length, mean_square
from duat_cli.statistics.divergence import by_tokens, kl_each

Interval = tuple[Tensor, Tensor, Tensor]  # estimate, low, high
Noise = Callable[[tuple[int, ...]], Tensor]  # draws a tensor of a shape, which may be overwritten
NO_WORD = -100  # in place of a token that is not predicted; torch's cross entropy leaves it out


class Metric(Protocol):
    """A measure of how far the output moved."""

    @property
    def name(self) -> MetricName: ...
    @property
    def unit(self) -> str: ...
    @property
    def meaning(self) -> str:
        """Meaning, in words, of a report's numbers, which are means over the prompts."""

    def forward(self, given: Given) -> Forward:
        """A pass over one prompt, (1, N), or over the prepared inputs of a picture or a sound, up to the output whose
        change counts."""

    def measured(self, reference: Tensor, output: Tensor, given: Given) -> float:
        """The damage of an ablated output."""

    def measured_each(self, reference: Tensor, outputs: Tensor, given: Given) -> list[float]:
        """The damage of each of several outputs, (B, N, ...), against one reference, (1, N, ...)."""
        return [self.measured(reference, output[None], given) for output in outputs]

    def probes(self, reference: Tensor, given: Given, noise: Noise, count: int) -> Tensor:
        """Random directions, (count, *reference.shape)."""

    def first_order(self, reference: Tensor, given: Given) -> Tensor | None:
        """Gradient of the damage at the reference, (*reference.shape); None where it is zero, as the damage is then of
        second order. Responses to it are put before those to the probes."""
        return None

    def predicted(self, responses: Tensor, confidence: float) -> Interval:
        """Predicted damage, mean over prompts, from responses (prompts, probes, …); removing a term changes the output
        by minus the term. By default for a damage of second order."""
        return mean_square(responses.square(), confidence)

    def of_set(self, responses: Tensor) -> Tensor:
        """Predicted damage for each prompt, (prompts, …), without an interval."""
        return responses.double().square().mean(dim=1)

    def adding(self, damage: Tensor) -> Tensor:
        """The quantity that adds up over terms that move the output in different directions: the square if the damage
        is a length, otherwise the damage itself."""
        return damage

    def slope(self, reference: Tensor, output: Tensor, given: Given) -> Tensor:
        """Gradient of the damage, relative to `reference`, at `output`; for hidden, half the gradient of its square."""

    def of_moved(self, responses: Tensor, start: float) -> Tensor:
        """Predicted damage for one prompt where a damage `start` is done already. responses: (1 + probes, …), to the
        slope and to probes, both at the output as it then is. The probes' covariance is the Hessian of KL and of
        nll."""
        return start - responses[0].double() + responses[1:].double().square().mean(dim=0)


@dataclass(frozen=True)
class Hidden(Metric):
    """Relative change of the final hidden states."""

    structure: ModelStructure
    name: MetricName = "hidden"
    unit: str = "relative"
    meaning: str = "mean over prompts of |change of the final hidden states| / |final hidden states|, over all tokens"

    def forward(self, given: Given) -> Forward:
        return lambda: last_states(run_stack(self.structure.stack, given), self.structure.stack)

    def measured(self, reference: Tensor, output: Tensor, given: Given) -> float:
        size = torch.linalg.vector_norm(reference.double())
        return float(torch.linalg.vector_norm(output.double() - reference.double()) / size)

    def probes(self, reference: Tensor, given: Given, noise: Noise, count: int) -> Tensor:
        drawn = noise((count, *reference.shape)).to(reference)
        return drawn / torch.linalg.vector_norm(reference.double()).to(reference)

    def predicted(self, responses: Tensor, confidence: float) -> Interval:
        return mean_length(responses.square(), confidence)

    def of_set(self, responses: Tensor) -> Tensor:
        return responses.double().square().mean(dim=1).sqrt()

    def adding(self, damage: Tensor) -> Tensor:
        return damage.square()

    def slope(self, reference: Tensor, output: Tensor, given: Given) -> Tensor:
        change = output.double() - reference.double()
        return (change / reference.double().square().sum()).to(output)

    def of_moved(self, responses: Tensor, start: float) -> Tensor:
        responses = responses.double()
        square = start**2 - 2 * responses[0] + responses[1:].square().mean(dim=0)
        return square.clamp_min(0).sqrt()


@dataclass(frozen=True)
class Divergence(Metric):
    """KL divergence of the next-token distribution, or of a classifier's."""

    model: Any
    causal: bool = True
    classes: Classes | None = None
    name: MetricName = "kl"

    @property
    def unit(self) -> str:
        return "nats" if self.classes == "text" else "nats/token"

    @property
    def meaning(self) -> str:
        what = "next-token distribution" if self.causal else "token distribution (a masked LM's, nothing masked)"
        if self.classes is not None:
            what = "distribution over its classes"
        of = "tokens that are no piece of a picture, video or sound" if pieces_of(self.model.config) else "tokens"
        over = "" if self.classes == "text" else f"the mean over {of} of "
        return f"mean over prompts of {over}KL(model's {what} || the ablated one), nats"

    def forward(self, given: Given) -> Forward:
        return lambda: by_row(head_output(self.model, given))

    def measured(self, reference: Tensor, output: Tensor, given: Given) -> float:
        return self.measured_each(reference, output, given)[0]

    def measured_each(self, reference: Tensor, outputs: Tensor, given: Given) -> list[float]:
        each = kl_each(reference[0], outputs)
        found: list[float] = each[:, self._words(reference, given)].mean(dim=1).tolist()
        return found

    def probes(self, reference: Tensor, given: Given, noise: Noise, count: int) -> Tensor:
        words = self._words(reference, given)
        fisher = _fisher_noise(reference, noise, count).div_(math.sqrt(2 * int(words.sum())))
        fisher[:, :, ~words] = 0
        return fisher

    def slope(self, reference: Tensor, output: Tensor, given: Given) -> Tensor:
        words = self._words(reference, given)
        found = wide(output).softmax(dim=-1) - wide(reference).softmax(dim=-1)
        found[:, ~words] = 0
        return (found / int(words.sum())).to(output)

    def _words(self, reference: Tensor, given: Given) -> Tensor:
        """Which rows of the output count, (N,); of classes of a whole input its only one."""
        rows = reference.shape[1]
        if isinstance(given, Tensor) or "input_ids" not in given or given["input_ids"].shape[1] != rows:
            return torch.ones(rows, dtype=torch.bool)
        words = words_of(self.model, given)
        if not bool(words.any()):
            raise InputError("--metric kl: a prompt of pictures alone has no words; use --metric hidden")
        return words


@dataclass(frozen=True)
class Loss(Metric):
    """Change of the next-token loss; negative where the ablated model does better."""

    model: Any
    name: MetricName = "nll"
    unit: str = "nats/token"
    meaning: str = (
        "mean over prompts of the change of the mean next-token loss on the prompt's own tokens, nats; may be negative"
    )

    def forward(self, given: Given) -> Forward:
        if not self.count(given):
            apart = "" if isinstance(given, Tensor) else ", pictures apart,"
            raise InputError(f"--metric nll: a prompt of one token{apart} has no next token; use longer prompts")
        return lambda: head_output(self.model, given)

    def measured(self, reference: Tensor, output: Tensor, given: Given) -> float:
        return self.loss(output, given) - self.loss(reference, given)

    def measured_each(self, reference: Tensor, outputs: Tensor, given: Given) -> list[float]:
        before = self.loss(reference, given)
        return [self.loss(output[None], given) - before for output in outputs]

    def loss(self, logits: Tensor, given: Given) -> float:
        """Mean next-token loss of one prompt, nats a token. logits: (1, N, vocabulary)."""
        pieces, targets = by_tokens(logits[0, :-1]), self._targets(given)
        total = 0.0
        for piece, target in zip(pieces, targets.split(len(pieces[0])), strict=True):
            total += float(functional.cross_entropy(piece.double(), target, ignore_index=NO_WORD, reduction="sum"))
        return total / int((targets != NO_WORD).sum())

    def count(self, given: Given) -> int:
        """How many tokens of a prompt are predicted."""
        return int((self._targets(given) != NO_WORD).sum())

    def _targets(self, given: Given) -> Tensor:
        """The token behind each but the last, (N - 1,); `NO_WORD` for a piece of a picture."""
        return token_ids(given)[0].masked_fill(~words_of(self.model, given), NO_WORD)[1:]

    def probes(self, reference: Tensor, given: Given, noise: Noise, count: int) -> Tensor:
        fisher = _fisher_noise(reference, noise, count).div_(math.sqrt(2 * self.count(given)))
        return self._scored(fisher, given)

    def _scored(self, found: Tensor, given: Given) -> Tensor:
        """A tensor of the output's shape, (..., N, vocabulary), set to zero where no token is predicted."""
        found[..., :-1, :][..., self._targets(given) == NO_WORD, :] = 0
        found[..., -1, :] = 0  # the last token has no next one
        return found

    def first_order(self, reference: Tensor, given: Given) -> Tensor:
        return self.slope(reference, reference, given)

    def predicted(self, responses: Tensor, confidence: float) -> Interval:
        first = -responses[:, 0].double().mean(dim=0)
        estimate, low, high = mean_square(responses[:, 1:].square(), confidence)
        return first + estimate, first + low, first + high

    def of_set(self, responses: Tensor) -> Tensor:
        return -responses[:, 0].double() + responses[:, 1:].double().square().mean(dim=1)

    def slope(self, reference: Tensor, output: Tensor, given: Given) -> Tensor:
        found, next_ids = wide(output).softmax(dim=-1), token_ids(given)[0, 1:, None]
        found[0, :-1].scatter_add_(1, next_ids, -torch.ones_like(next_ids, dtype=found.dtype))
        return (self._scored(found, given) / self.count(given)).to(output)


def metric_for(name: MetricName | None, model: Any, structure: ModelStructure, head: HeadTest | None = None) -> Metric:
    """The metric asked for; by default kl where there is an LM head or a classification head, else hidden. head: the
    test of the head, if it has run. Raises InputError where the model has no such metric."""
    head = head or head_of(model, structure.stack)
    if name == "hidden" or (name is None and not head.predicts):
        return Hidden(structure)
    if not head.predicts:
        way = " or --stack decoder" if is_pair(model) and structure.stack is not model.get_decoder() else ""
        raise InputError(f"--metric {name}: {head.why_no_next_token()}; use --metric hidden{way}")
    if name != "nll":
        return Divergence(model, head.exists and head.causal, head.classes)
    if (why := why_no_loss(model, head)) is not None:
        raise InputError(f"--metric nll: {why}; use --metric kl")
    return Loss(model)


def token_ids(given: Given) -> Tensor:
    """Token ids, (1, N); models with a loss read text."""
    return given if isinstance(given, Tensor) else given["input_ids"]


def rounding_of(name: MetricName, dtype: torch.dtype) -> float:
    """The damage that rounding alone may do to an output of that dtype: half a square for kl, which is of second
    order."""
    change = rounding_for(dtype)
    return change**2 / 2 if name == "kl" else change


def why_no_loss(model: Any, head: HeadTest) -> str | None:
    """Why a model has no next-token loss; None where it has one."""
    if not head.exists:
        return head.why_no_next_token()
    return None if head.causal else f"{type(model).__name__} does not predict the next token"


def hidden_states(output: Any, stack: Any) -> Tensor:
    """Hidden states of a pass of this stack, (1, N, M). Raises UnsupportedModelError where its output has none, as that
    of a model with two towers, which returns scores."""
    hidden = getattr(output, "last_hidden_state", None)
    if isinstance(hidden, Tensor) and hidden.ndim == 2:  # from a module that takes patches without a batch axis
        return hidden[None]
    hidden = hidden if isinstance(hidden, Tensor) else output[0]
    if isinstance(hidden, Tensor) and hidden.ndim == 4:
        return by_place(hidden, stack)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden is getattr(output, "logits", None):
        raise UnsupportedModelError("its forward pass gives no hidden states of tokens, whose change could be measured")
    return hidden


def last_states(output: Any, stack: Any) -> Tensor:
    """Hidden states of a pass, (1, N, M); for an encoder that runs within its model (DETR), those of the encoder, not
    of the decoder behind it."""
    encoded = getattr(output, "encoder_last_hidden_state", None)
    return encoded if isinstance(encoded, Tensor) else hidden_states(output, stack)


def _fisher_noise(logits: Tensor, noise: Callable[[tuple[int, ...]], Tensor], count: int) -> Tensor:
    """A g = (diag(√p) - p√pᵀ) g for every token, (count, 1, N, vocabulary)."""
    p = wide(logits).softmax(dim=-1)  # in bfloat16 its sum would be off by percents
    drawn, root = noise((count, *logits.shape)).to(p), p.sqrt()
    for one in drawn:  # in place: this is the largest tensor of the run
        one.mul_(root)
        one.sub_(p * one.sum(dim=-1, keepdim=True))
    return drawn.to(logits.dtype)
