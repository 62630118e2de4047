"""The order in which terms are removed: by predicted damage or, with several kinds, by damage per parameter.

Sets are prefixes of the order, so they are nested. Terms that are removed together are called a unit here: a single
term; with --uniform one neuron of every FFN, or the heads of one key and value head in every attention, so that all of
them can leave the file.

Neurons, heads and experts are removed in steps where a set of a given size is asked for; whole parts are if each was
ablated by itself, and then their damage is the measured one. After each step, a remaining term counts with its own
damage and with what it does together with all that is gone: two terms that add the same vector do four times the damage
of one, in squares. Cancellation counts only for whole parts, which are few: the prediction is linear, and sets that it
picks from many terms would overshoot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.grouping import by_key
from duat_cli.kinds import Kind
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.parameters import BlockParameters

Damages = Callable[[Sequence[Sequence[int]]], Tensor]  # units, each the places of its terms -> the damage of each
STEPS = 50
UNIFORM: tuple[Kind, ...] = ("neuron", "head")  # kinds whose number a config states once for all blocks


class Alike:
    """2 <change by what is gone, change by the term>, estimated from their responses to the probes of all prompts.

    Unless signed, its standard error is subtracted, so that similarity by chance does not count, and the result is cut
    off below 0.
    """

    def __init__(self, responses: Sequence[Tensor], *, signed: bool = False) -> None:
        """responses: one tensor per prompt, (probes, terms)."""
        self._responses, self._signed = responses, signed
        self._sums = [one.new_zeros(len(one)) for one in responses]

    def go(self, gone: Tensor) -> None:
        for number, one in enumerate(self._responses):
            self._sums[number] += one[:, gone].sum(dim=1)

    def adding(self) -> Tensor:
        pairs, count = list(zip(self._responses, self._sums, strict=True)), sum(map(len, self._sums))
        mean = torch.stack([total @ one for one, total in pairs]).double().sum(dim=0) / count
        if self._signed:
            return 2 * mean
        square = torch.stack([total.square() @ one.square() for one, total in pairs]).double().sum(dim=0) / count
        error = ((square - mean.square()).clamp_min(0) / count).sqrt()
        return 2 * (mean - error).clamp_min(0)


@dataclass(frozen=True)
class Sizes:
    """How many parameters the terms hold, and which heads go together."""

    parameters: Tensor
    """Parameters of every term, (terms,) float64."""
    whole: tuple[float, float]
    """Parameters of all blocks, and of the model. Those that block calls share count at each call, as in its terms."""
    groups: tuple[int, ...] = ()
    """For every block call, how many neighbouring heads share a key and value head."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        structure: ModelStructure,
        parameters: Mapping[nn.Module, BlockParameters],
        terms: TermList,
    ) -> Sizes:
        """parameters: of every block."""
        calls = structure.calls
        each = [float(parameters[calls[term.block]].each[term.kind][term.index or 0]) for term in terms.ids]
        blocks = sum(p.numel() for call in calls for p in call.parameters())
        once = sum(p.numel() for p in {p for call in calls for p in call.parameters()})
        every = sum(p.numel() for p in model.parameters()) - once + blocks
        groups = tuple(parameters[call].group for call in calls)
        return cls(torch.tensor(each, dtype=torch.float64), (float(blocks), float(every)), groups)


@dataclass(frozen=True, eq=False)
class Group:
    """Kinds whose terms go into one set, and the options for the set."""

    kinds: tuple[Kind, ...]
    terms: TermList
    sizes: Sizes
    options: PruneOptions

    @property
    def name(self) -> str:
        """The kinds, written as for --granularity."""
        return ",".join(self.kinds)

    @property
    def uniform(self) -> bool:
        """Whether every block is to lose equally many terms."""
        return self.options.uniform and set(self.kinds) <= set(UNIFORM)

    @property
    def wanted(self) -> float | None:
        """How many parameters to remove, whatever the damage; None: as many as the budget allows."""
        share = self.options.remove
        return None if share is None else share * self.sizes.whole[self.options.of_all]

    @property
    def held(self) -> Tensor:
        """Divisor of each term's damage in the order, (terms,): its parameters with several kinds, 1 with one kind."""
        parameters = self.sizes.parameters
        return parameters.clamp_min(1.0) if len(self.kinds) > 1 else torch.ones_like(parameters)


Order = tuple[Tensor, list[int]]
"""Places in the term list, (terms,), in the order in which terms are removed; and the allowed sizes of sets, rising."""


def order_of(
    group: Group, damages: Damages, gone: Sequence[int], alike: Callable[[Sequence[int]], Alike] | None
) -> Order:
    """The order of the group's terms that are not gone yet. alike: makes the `Alike` of terms by their places; None:
    the order is made without steps.

    No set has all blocks or, with `uniform`, all neurons of an FFN or all heads of an attention.
    """
    left, kinds = set(gone), group.kinds
    members = [k for kind in kinds for k in group.terms.places(kind) if k not in left]
    if group.uniform:
        return _uniform(group, members, damages)
    damage, held = damages([[k] for k in members]), group.held[members]
    order = (damage / held).argsort(stable=True) if alike is None else _in_steps(damage, held, alike(members))
    most = len(members) - (kinds == ("block",) and not left)
    return torch.tensor(members, dtype=torch.long)[order], list(range(1, most + 1))


def _in_steps(damage: Tensor, held: Tensor, alike: Alike) -> Tensor:
    """The order made in STEPS steps. Each removes the terms with the least damage per `held`, up to the step's share of
    the sum of `held`."""
    left, taken = torch.arange(len(damage)), [torch.arange(0)]
    gone, whole = 0.0, float(held.sum())
    for step in range(1, STEPS):
        order = left[((damage + alike.adding()) / held)[left].argsort(stable=True)]
        count = int((gone + held[order].cumsum(dim=0) <= whole * step / STEPS).sum())
        if count:
            taken.append(order[:count])
            alike.go(taken[-1])
            left, gone = order[count:].sort().values, gone + float(held[taken[-1]].sum())
    taken.append(left[((damage + alike.adding()) / held)[left].argsort(stable=True)])
    return torch.cat(taken)


def _uniform(group: Group, members: Sequence[int], damages: Damages) -> Order:
    terms, sizes = group.terms, group.sizes
    units: list[tuple[float, list[int]]] = []  # a unit's damage per parameter, and its terms
    rest: list[int] = []
    for kind in group.kinds:
        mine = [k for k in members if terms.ids[k].kind == kind]
        rounds, last = _rounds(terms, mine, damages, sizes.groups)
        rest += last
        held = [float(sizes.parameters[unit].sum().clamp_min(1.0)) for unit in rounds]
        worth, highest = [], -torch.inf
        for damage, size in zip(damages(rounds).tolist() if rounds else [], held, strict=True):
            highest = max(highest, damage / size)  # never falls, which keeps the order within a kind
            worth.append(highest)
        units += zip(worth, rounds, strict=True)
    units.sort(key=lambda unit: unit[0])
    places, ends = [], list[int]()
    for _, unit in units:
        places += unit
        ends.append(len(places))
    return torch.tensor(places + rest, dtype=torch.long), ends


def _rounds(
    terms: TermList, members: Sequence[int], damages: Damages, groups: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Units with `--uniform`: the least damaging group of every block, then the next of every block, and so on while
    every block keeps one; and the terms that are left."""

    def unit(place: int) -> tuple[int, int]:
        term = terms.ids[place]
        assert term.index is not None
        return term.block, term.index // (groups[term.block] if term.kind == "head" else 1)

    together = list(by_key((unit(place), place) for place in members).values())
    order = damages(together).argsort(stable=True).tolist() if together else []
    by_block = by_key((terms.ids[together[k][0]].block, together[k]) for k in order)
    count = min((len(units) for units in by_block.values()), default=1) - 1
    blocks = sorted(by_block)
    rounds = [[place for block in blocks for place in by_block[block][k]] for k in range(count)]
    rest = [place for units in by_block.values() for last in units[count:] for place in last]
    return rounds, sorted(rest)
