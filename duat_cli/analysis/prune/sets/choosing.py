"""From the responses of all terms to the sets that are worth measuring, sketched once or in several rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from duat_cli.analysis.prune.sets.nested import Nested, nested_of
from duat_cli.analysis.prune.sets.order import Group
from duat_cli.analysis.prune.sets.path import Sketch, path_in_rounds, path_of
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.sets import SketchRound

Again = Callable[[Sequence[TermId]], Sketch]  # a sketch of the model without these terms
Damages = Callable[[Sequence[Sequence[TermId]]], list[float]]  # of sets, mean over the prompts


def chosen_once(group: Group, sketch: Sketch) -> Nested:
    """Of one sketch."""
    return nested_of(group, path_of(group, sketch))


def chosen_in_rounds(group: Group, sketch: Sketch, again: Again, damages: Damages) -> Nested:
    """Of several sketches, with what they brought over one; of one, where no more are asked for."""
    single, parameters = path_of(group, sketch), group.sizes.parameters
    target = single.within(group)
    if group.options.rounds == 1 or not target:
        return nested_of(group, single)
    wanted = float(parameters[single.places[:target]].sum())
    if group.wanted is not None:  # the set of one round goes beyond that by a part of its last term
        wanted = min(wanted, group.wanted)
    path, stages = path_in_rounds(group, single, again, wanted)
    whole = path.reaching(parameters, wanted)
    ends = [*(end for end, _ in stages), whole]
    held = [float(parameters[path.places[:end]].sum()) for end in ends]
    alone = [single.reaching(parameters, one) for one in held]
    sets = [single.places[:size] for size in alone] + [path.places[:whole]]
    *singles, last = damages([[group.terms.ids[k] for k in places.tolist()] for places in sets])
    rounds = [
        SketchRound(removed=end, measured=here, single_removed=size, single_measured=there)
        for end, here, size, there in zip(ends, [*(damage for _, damage in stages), last], alone, singles, strict=True)
    ]
    return nested_of(group, path, rounds)
