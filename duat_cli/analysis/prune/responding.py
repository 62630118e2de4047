"""The results of one prompt for all terms, before any set is chosen: above all its responses, and the response to the
gradient of its loss for Taylor's criterion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from duat_cli.analysis.prune.terms.ablation import Effect
from duat_cli.analysis.prune.terms.criteria import Activations
from duat_cli.analysis.prune.terms.damage import Loss
from duat_cli.analysis.prune.terms.ground import Ground
from duat_cli.analysis.prune.terms.readings import Readings
from duat_cli.analysis.prune.terms.responses import Responses, TermList, Without
from duat_cli.analysis.session import Session
from duat_cli.models.discovery.causality import LogitsPass
from duat_cli.models.discovery.modality import Given
from duat_cli.models.sweep.passes import Means, Recorded


@dataclass(frozen=True)
class Responded:
    """Results of the gradients of one prompt."""

    responses: Tensor
    """(probes, terms), float32."""
    slope: Tensor | None
    """(terms,), float32: the response to the gradient of the loss; None where there is no loss."""
    loss: tuple[float, int] | None
    """The prompt's own loss, in nats per token, and the size of the vocabulary."""


@dataclass(frozen=True)
class Part:
    """All results of one prompt: of its gradients, its sweep and its ablations."""

    responded: Responded
    readings: Readings
    error: float
    """Error of the certificate, largest over the blocks."""
    effects: list[Effect]
    """Effect of ablating each term of the sample, kind by kind."""
    seen: Activations = field(default_factory=Activations)
    """Activations at the sites; empty where they are added up elsewhere."""


class Responder:
    """Carries gradients back from the output; prompts go side by side where weights are read block by block."""

    def __init__(
        self,
        session: Session,
        ground: Ground,
        terms: TermList,
        given: Sequence[Given],
        probes: int,
        means: Means | None,
    ) -> None:
        """given: the model inputs of all prompts. means: as for `Responses`."""
        self._session, self._ground, self._terms, self._given = session, ground, terms, given
        self._structure, self._weights = session.structure, session.weights
        self._probes, self._means = probes, means
        model = session.loaded.headed
        # the loss of Taylor's criterion; None for a model that predicts no next token
        self._loss = None if ground.no_loss else Loss(model)

    def of(self, numbers: Sequence[int], recorded: Sequence[Recorded]) -> list[Responded]:
        """Results of the gradients of the prompts with these numbers. recorded: one per number."""
        name = self._ground.metric.name
        found = [self.of_metric(number, one) for number, one in zip(numbers, recorded, strict=True)]
        slopes = self._slopes(numbers, recorded)
        self._carry([*found, *(slope for slope in slopes if slope is not None)])
        responded = []
        for number, passed, one, slope in zip(numbers, recorded, found, slopes, strict=True):
            responses, own, loss = one.found(), None, None
            if self._loss is not None and self._scored(number):
                own = (responses if slope is None else slope.found())[0]
                if name != "hidden":
                    loss = self._loss.loss(passed.output, self._given[number]), passed.output.shape[-1]
            responded.append(Responded(responses, own, loss))
        return responded

    def of_metric(self, number: int, recorded: Recorded, without: Without | None = None) -> Responses:
        """Responses to the probes of the metric, not carried back yet."""
        return Responses(
            self._structure, self._ground.sites, self._ground.metric, self._given[number], recorded, self._terms,
            self._probes, number, self._means, self._weights, without,
        )  # fmt: skip

    def _scored(self, number: int) -> bool:
        return self._loss is not None and self._loss.count(self._given[number]) > 0

    def _slopes(self, numbers: Sequence[int], recorded: Sequence[Recorded]) -> list[Responses | None]:
        """Responses to the gradient of the loss; None where there is no loss or, with metric nll, where the metric's
        responses have it already. The loss needs a pass that ends in logits."""
        name, model = self._ground.metric.name, self._session.loaded.headed
        wanted = [number for number in numbers if self._scored(number) and name != "nll"]
        known = self._ground.logits
        apart = [number for number in wanted if name == "hidden" and number not in known]
        heads = {number: LogitsPass(model, self._given[number]) for number in apart}
        self._session.together(list(heads.values()))
        found: list[Responses | None] = []
        for number, one in zip(numbers, recorded, strict=True):
            if self._loss is None or number not in wanted:
                found.append(None)
                continue
            passed = one
            if name == "hidden":
                logits = heads[number].found if number in heads else known.pop(number)
                assert logits is not None
                passed = Recorded(logits, one.calls)
            found.append(
                Responses(
                    self._structure, self._ground.sites, self._loss, self._given[number], passed, self._terms, 0, 0,
                    weights=self._weights,
                )
            )  # fmt: skip
        return found

    def _carry(self, found: Sequence[Responses]) -> None:
        """Carries the gradients backwards through all blocks."""
        if self._weights is None:
            for one in found:
                one.alone()
            return
        self._session.together([piece for one in found for piece in one.pieces])
        for number in reversed(range(len(self._structure.calls))):
            self._weights.bring(self._structure.calls[number])
            for one in found:
                for place in range(len(one.pieces)):
                    one.through(number, place)
