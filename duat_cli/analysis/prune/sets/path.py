"""An order of terms with the predicted damage of each of its beginnings, from one sketch of the model or several.

A sketch is the responses of all terms to a few random directions of the output. Taken of the model as it is, it knows
the interactions of terms to first order alone: what a removal does to the directions of others is not in it. With
several rounds the model is sketched again after each part of the terms is gone: responses are then those of the pruned
model, to the slope of the damage there, which knows what is gone already exactly, and to random directions.
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
    """The responses of all terms, and of what is gone already."""

    metric: Metric
    responses: Sequence[Tensor]
    """A prompt: (probes, terms)."""
    starts: Sequence[float] | None = None
    """A prompt: the measured damage of what is gone, whose slope the first response is to; None: nothing is."""
    known: Mapping[int, float] = field(default_factory=dict)
    """By its place, the measured damage of a term that was ablated by itself, mean over the prompts."""

    @property
    def start(self) -> float:
        """Measured damage of what is gone, mean over the prompts."""
        return sum(self.starts) / len(self.starts) if self.starts else 0.0

    def damages(self, units: Sequence[Sequence[int]]) -> Tensor:
        """What the removal of each unit adds to the damage of a set, mean over the prompts, (units,) float64.

        Of a damage that is a length that is its square: two terms that move the output at right angles add in squares,
        so that a term of twice the parameters may do root two times the damage.

        Where something is gone already: the square of what it does to the output, the slope of the damage left out. A
        slope leads to terms that all undo the same change, and together overshoot it.

        Of single terms that are all known, the measured damage: of a whole part the prediction may be off by far.
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
        """What these terms do alike with those of them that go. whole: of parts that are few, so that the least of them
        is not the least by chance; what cancels then counts."""
        index, first = torch.tensor(places, dtype=torch.long), len(self.responses[0]) - self.probes
        return Alike([one[first:, index] for one in self.responses], signed=whole)

    @property
    def probes(self) -> int:
        """Rows of the responses that are to random directions: all, or all but that to a slope."""
        slope = self.starts is not None or self.metric.name == "nll"
        return len(self.responses[0]) - slope

    def curve(self, order: Tensor) -> Tensor:
        """The predicted mean damage without the first m of `order` as well, for m = 1 … len(order)."""
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
    """An order of terms, and the predicted damage of its beginnings."""

    places: Tensor
    """(terms,) of the term list."""
    ends: list[int]
    """How many terms a set may have, rising."""
    curve: Tensor
    """(largest set,): of the first 1, 2, … terms."""

    def reaching(self, parameters: Tensor, wanted: float, gone: float = 0.0) -> int:
        """The smallest set that holds, with what is gone, as many parameters; the largest one if none does.

        parameters: of every term.
        """
        held = parameters[self.places].cumsum(dim=0) + gone
        return next((end for end in self.ends if float(held[end - 1]) >= wanted), self.ends[-1] if self.ends else 0)

    def within(self, group: Group) -> int:
        """The size of the set that is asked for, by the prediction alone; 0 if there is none."""
        if group.wanted is not None:
            return self.reaching(group.sizes.parameters, group.wanted)
        return max((end for end in self.ends if float(self.curve[end - 1]) <= group.options.budget), default=0)

    def beginning(self, size: int) -> Path:
        """A set of this size alone."""
        return Path(self.places[:size], [end for end in self.ends if end <= size], self.curve[:size])

    def then(self, other: Path) -> Path:
        """This, and behind it the terms of a path that begins without these."""
        ends = [*self.ends, *(len(self.places) + end for end in other.ends)]
        places, curve = torch.cat([self.places, other.places]), torch.cat([self.curve, other.curve])
        return Path(places, ends, curve)


def path_of(group: Group, sketch: Sketch, gone: Sequence[int] = ()) -> Path:
    """From one sketch, behind what is gone in it.

    Terms also count with what they do alike with what is gone where they are whole parts that are all known, or small
    ones of which a set of a size was asked for. The probes that pick small ones then predict less for the set than it
    does, so that is not for a prediction which is to meet a budget.
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
    """Of as many rounds as the options say, each of which takes an equal share of `wanted` parameters; and of each but
    the last how many terms are gone at its end, with the damage that is measured of it.
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
