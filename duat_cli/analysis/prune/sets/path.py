"""An order of terms with the predicted damage of each of its prefixes, from one sketch of the model or several.

A sketch is the responses of all terms to a few random directions of the output. A sketch of the whole model has the
interactions of terms to first order only: how a removal changes the gradients of other terms is not in it. With several
rounds, the model is sketched again after each part of the terms is gone. The responses are then those of the pruned
model: to the slope of the damage there, which takes exact account of what is gone, and to random directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duat_cli.analysis.prune.sets.order import Alike, Group, order_of
from duat_cli.analysis.prune.terms.damage import Metric
from duat_cli.kinds import WHOLE
from duat_cli.models.terms.sites import TermId


@dataclass(frozen=True)
class Sketch:
    """The responses of all terms, and the damage of those that are gone already."""

    metric: Metric
    responses: Sequence[Tensor]
    """One tensor per prompt, (probes, terms)."""
    starts: Sequence[float] | None = None
    """Measured damage of what is gone, per prompt; the first response is to its slope. None: nothing is gone."""
    known: Mapping[int, float] = field(default_factory=dict)
    """Measured damage of terms that were ablated by themselves, mean over the prompts, by the places of the terms."""

    @property
    def start(self) -> float:
        """Measured damage of what is gone, mean over the prompts."""
        return sum(self.starts) / len(self.starts) if self.starts else 0.0

    def damages(self, units: Sequence[Sequence[int]]) -> Tensor:
        """Damage that the removal of each unit adds to that of a set, mean over the prompts, (units,) float64.

        For a damage that is a length, this is its square: terms that move the output at right angles add in squares, so
        that a term with twice the parameters may do √2 times the damage.

        Where something is gone already, it is the square of the unit's effect on the output, without the slope of the
        damage: the slope would favour terms that all undo the same change, and together overshoot it.

        For single terms that are all known it is the measured damage: the prediction for a whole part may be far off.
        """
        if all(len(unit) == 1 and unit[0] in self.known for unit in units):
            return self.metric.adding(torch.tensor([self.known[place] for [place] in units], dtype=torch.float64))
        index = torch.tensor([place for unit in units for place in unit], dtype=torch.long)
        owner = torch.repeat_interleave(torch.arange(len(units)), torch.tensor([len(unit) for unit in units]))
        total = torch.zeros(len(units), dtype=torch.float64)
        for one in self.responses:
            sums = torch.zeros(len(one), len(units), dtype=torch.float64)
            sums.index_add_(1, owner, one[:, index].double())
            if self.starts is None:
                total += self.metric.of_set(sums[None])[0]
            else:
                total += sums[1:].square().mean(dim=0)
        mean = total / len(self.responses)
        return self.metric.adding(mean) if self.starts is None else mean

    def alike(self, places: Sequence[int], *, whole: bool = False) -> Alike:
        """Effect of each of these terms together with those that are gone. whole: whether they are parts, of which
        there are so few that the least is not least by chance; cancellation then counts."""
        index, first = torch.tensor(places, dtype=torch.long), len(self.responses[0]) - self.probes
        return Alike([one[first:, index] for one in self.responses], signed=whole)

    @property
    def probes(self) -> int:
        """How many rows of the responses are to random directions: all, or all but one that is to a slope."""
        slope = self.starts is not None or self.metric.name == "nll"
        return len(self.responses[0]) - slope

    def curve(self, order: Tensor) -> Tensor:
        """The predicted mean damage once the first m terms of `order` are gone too, for m = 1 … len(order)."""
        total = torch.zeros(len(order), dtype=torch.float64)
        for prompt, one in enumerate(self.responses):
            sums = one[:, order].double().cumsum(dim=1)  # (probes, sets)
            if self.starts is None:
                total += self.metric.of_set(sums[None])[0]
            else:
                total += self.metric.of_moved(sums, self.starts[prompt]) - self.starts[prompt]
        return self.start + total / len(self.responses)


@dataclass(frozen=True)
class Path:
    """An order of terms, and the predicted damage of its prefixes."""

    places: Tensor
    """Places in the term list, (terms,)."""
    ends: list[int]
    """Allowed sizes of sets, rising."""
    curve: Tensor
    """Predicted damage of the first 1, 2, … terms, (largest set,)."""

    def reaching(self, parameters: Tensor, wanted: float, gone: float = 0.0) -> int:
        """Size of the smallest set that holds, together with what is gone, `wanted` parameters; the largest if none
        does.

        parameters: of every term. gone: parameters of what is gone.
        """
        held = parameters[self.places].cumsum(dim=0) + gone
        return next((end for end in self.ends if float(held[end - 1]) >= wanted), self.ends[-1] if self.ends else 0)

    def within(self, group: Group) -> int:
        """The size of the set that is asked for, by the prediction alone; 0 if there is none."""
        if group.wanted is not None:
            return self.reaching(group.sizes.parameters, group.wanted)
        return max((end for end in self.ends if float(self.curve[end - 1]) <= group.options.budget), default=0)

    def beginning(self, size: int) -> Path:
        """The path up to a set of this size."""
        return Path(self.places[:size], [end for end in self.ends if end <= size], self.curve[:size])

    def then(self, other: Path) -> Path:
        """This path followed by another, which was made once the terms of this one were gone."""
        ends = [*self.ends, *(len(self.places) + end for end in other.ends)]
        places, curve = torch.cat([self.places, other.places]), torch.cat([self.curve, other.curve])
        return Path(places, ends, curve)


def path_of(group: Group, sketch: Sketch, gone: Sequence[int] = ()) -> Path:
    """The path by one sketch, of the terms that are not gone in it.

    Terms are removed in steps, so that they count with what they do together with those gone, where they are whole
    parts whose damage is all known, or smaller terms of which a set of a given size was asked for. For smaller terms
    the prediction is then too low, as the same probes pick the terms: so not where the prediction has to meet a budget.
    """
    kinds = set(group.kinds)
    alike: Callable[[Sequence[int]], Alike] | None = None
    if kinds <= WHOLE and all(k in sketch.known for kind in group.kinds for k in group.terms.places(kind)):
        alike = functools.partial(sketch.alike, whole=True)
    elif group.wanted is not None and not kinds & WHOLE:
        alike = sketch.alike
    places, ends = order_of(group, sketch.damages, gone, alike)
    return Path(places, ends, sketch.curve(places[: ends[-1] if ends else 0]))


Again = Callable[[Sequence[TermId]], Sketch]  # a sketch of the model without these terms


def path_in_rounds(group: Group, first: Path, again: Again, wanted: float) -> tuple[Path, list[tuple[int, float]]]:
    """The path made in as many rounds as the options say, each of which takes an equal share of `wanted` parameters;
    and for each round but the last, how many terms are gone at its end and the damage measured there.
    """
    parameters, rounds, ends = group.sizes.parameters, group.options.rounds, list[tuple[int, float]]()
    path, rest = first.beginning(0), first
    for number in range(1, rounds):
        size = rest.reaching(parameters, wanted * number / rounds, float(parameters[path.places].sum()))
        path = path.then(rest.beginning(size))
        gone = path.places.tolist()
        sketch = again([group.terms.ids[k] for k in gone])
        ends.append((len(gone), sketch.start))
        rest = path_of(group, sketch, gone)
    return path.then(rest), ends
