"""Repair of a pruned model: layers that read the terms that stay are refitted, block by block, to the dense model.

Each calibration prompt is carried up to a block twice: through the dense model, and through the model that is pruned
and already repaired up to there. The dense block runs; then each layer of the block that reads neurons or heads gets

    W <- W_K + (X_KᵀX_K + λ I)⁻¹ X_Kᵀ R

X_K is what the pruned model feeds the layer, and R is what is missing: the dense layer's output minus the layer's own.
For a layer whose output is in the block's output as it is, R is the dense block's output minus the block's own, so that
the layer also makes good what was lost before it. (An attention layer refitted so would repair what the FFN behind it
is about to repair.) Of R only sums over tokens are kept; of X also the inputs of a layer whose output arrives, from
which the block's output follows once it is refitted. λ is the one with the least residual on prompts held back, where
no change at all is one of the choices; then all tokens are fitted with it. The outputs of the dense model are the same
for every set, and are kept as far as they fit.

A token has weight 1 / max(|y|^2, median of |y|^2 over tokens), with y the dense model's output there, so that residuals
are relative. Otherwise the few tokens with massive activations (Sun et al. 2024; BERT's [CLS] has 96 % of |R|^2 in a
layer of MiniLM) alone would be fitted, at the cost of all others.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.repair.consumers import Consumer
from duat_cli.models.block.slots import Arguments
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.surgery import exchanged
from duat_cli.models.sweep.passes import BlockCall, Removal, Removals
from duat_cli.models.terms.sites import Site, watching
from duat_cli.operators.refit import RIDGES, Moments, chosen_ridge

HELD_BACK = 4  # one in so many prompts, or tokens of the only prompt, chooses the ridge
Values = dict[nn.Parameter, Tensor]


Own = Mapping[Site, list[Tensor]]
"""Outputs of layers by their sites; the list has one tensor if the layer runs once."""


@dataclass(frozen=True)
class Calls:
    """The first hidden states under one prompt, and the other arguments that each block is called with."""

    first: Tensor
    arguments: Sequence[tuple[Sequence[Any], dict[str, Any]]]
    after: Sequence[Tensor] = ()
    """Hidden states behind every block of the dense model; empty: not kept, so it runs again for every set."""
    own: Own = field(default_factory=dict)
    """Outputs of the layers of `outputs`, where `after` is kept."""
    added: Mapping[int, Tensor] = field(default_factory=dict)
    """Features of a picture that the model adds to the stream in front of a block, by its number."""

    @classmethod
    def of(cls, structure: ModelStructure, calls: Sequence[BlockCall], own: Own | None = None) -> Calls:
        """The calls of a recorded pass. own: outputs of the layers of `outputs`; None: `after` is not kept."""
        kept = list[Arguments]()
        for number, call in enumerate(calls):
            empty = call.before.new_zeros(()).expand_as(call.before)  # one number in memory
            kept.append(structure.block(number).parts.hidden.put(call.args, call.kwargs, empty))
        added = {
            number: call.before - front.after
            for number, (front, call) in enumerate(itertools.pairwise(calls), 1)
            if call.before is not front.after
        }
        if own is None:
            return cls(calls[0].before, kept, added=added)
        return cls(calls[0].before, kept, [call.after for call in calls], own, added)


def outputs(consumers: Mapping[int, Sequence[Consumer]]) -> list[Site]:
    """Output sites of the layers that are refitted to their own dense output, not to the block's."""
    return [_output(one) for here in consumers.values() for one in here if not one.arrives]


@dataclass
class Refit:
    """The new weights for one set, and how they came about."""

    values: Values = field(default_factory=dict)
    """Parameter -> its new value."""
    ridges: dict[nn.Parameter, float] = field(default_factory=dict)
    """λ of every layer that was refitted, by its weight."""
    unchanged: int = 0
    """Layers that every refit would have made worse on the prompts held back."""
    short: int = 0
    """Layers with more inputs than there are tokens."""
    irregular: set[int] = field(default_factory=set)
    """Blocks with a layer that does not run once for every token, such as a routed one; it is left as it is."""


class Refitting:
    """Repairs the sets of one model with the same calibration prompts."""

    def __init__(
        self,
        structure: ModelStructure,
        consumers: Mapping[int, Sequence[Consumer]],
        prompts: Sequence[Calls],
        dtype: torch.dtype,
    ) -> None:
        """consumers: by block call. prompts: at least one. dtype: new weights are rounded to it."""
        self._structure, self._consumers, self._prompts, self._dtype = structure, consumers, prompts, dtype
        self.tokens = sum(prompt.first.shape[1] for prompt in prompts)

    @torch.no_grad()
    def refit(self, removals: Removals, tick: Callable[[int, int], None], near: Refit | None = None) -> Refit:
        """The repair of a set; leaves the model unchanged. near: a repair of the same set fitted to more prompts, at
        whose ridges the search for these starts."""
        found, first = Refit(), min(removals)
        dense = [prompt.first for prompt in self._prompts]
        for number in range(first):
            dense = self._dense(number, dense, ()).after
        pruned, count = dense, len(self._structure.calls)
        with contextlib.ExitStack() as stack:
            for number in range(first, count):
                tick(number - first, count - first)
                removal, after = removals.get(number), None
                here = [one for one in self._consumers[number] if not one.silent(removal)]
                wanted = self._dense(number, dense, here)
                for one in here:
                    start = None if near is None else near.ridges.get(one.weight, RIDGES[-1])
                    values, after = self._layer(number, one, removal, pruned, wanted, found, start)
                    stack.enter_context(exchanged(values))
                    found.values |= values
                dense = wanted.after
                if after is None:
                    after = [self._run(number, place, hidden, removal) for place, hidden in enumerate(pruned)]
                pruned = after
        return found

    def _run(
        self,
        number: int,
        place: int,
        hidden: Tensor,
        removal: Removal | None,
        watch: Mapping[Site, list[Tensor]] = {},
        until: Site | None = None,
    ) -> Tensor:
        """Runs one block on one prompt, and appends what each site in `watch` holds to its list. until: the site behind
        which the block is stopped; the hidden states returned are then those in front of the block."""

        def see(site: Site, value: Tensor, index: Tensor | None) -> None:
            watch[site].append(value.detach().clone())
            if site == until:
                raise _SeenError

        if (added := self._prompts[place].added.get(number)) is not None:
            hidden = hidden + added
        if removal is not None and removal.whole:
            return removal.bridge(hidden)
        parts, before = self._structure.block(number).parts, hidden.clone()  # blocks may write to it
        args, kwargs = parts.hidden.put(*self._prompts[place].arguments[number], before)
        with contextlib.ExitStack() as stack:
            if removal is not None:  # first, so that `see` gets the values with the removed terms gone
                stack.enter_context(watching(list(removal.masks), removal.edit))
            stack.enter_context(watching(list(watch), see))
            try:
                return parts.hidden.found(parts.module(*args, **kwargs), hidden)
            except _SeenError:
                return hidden

    def _dense(self, number: int, dense: Sequence[Tensor], here: Sequence[Consumer]) -> _Wanted:
        own: list[Own] = []
        after = []
        for place, hidden in enumerate(dense):
            prompt = self._prompts[place]
            if prompt.after:
                own.append(prompt.own)
                after.append(prompt.after[number])
            else:
                own.append({_output(one): [] for one in here if not one.arrives})
                after.append(self._run(number, place, hidden, None, own[-1]))
        return _Wanted(after, own)

    def _layer(
        self,
        number: int,
        one: Consumer,
        removal: Removal | None,
        pruned: Sequence[Tensor],
        wanted: _Wanted,
        found: Refit,
        near: float | None,
    ) -> tuple[Values, list[Tensor] | None]:
        """The layer's new weights, none where no input is left or no refit helps; and the block's outputs with them,
        where they follow from what was seen."""
        kept = one.kept(removal)
        features = len(kept) + (one.bias is not None)
        if not len(kept):
            return {}, None
        width = one.weight.shape[1 - one.axis]
        bias = one.bias is not None
        fit, back = (Moments(features, width, one.weight.device, bias=bias) for _ in range(2))
        output = _output(one)
        targets = [[whole] if one.arrives else own[output] for whole, own in zip(wanted.after, wanted.own, strict=True)]
        typical = _typical(targets)
        behind: list[tuple[Tensor, Tensor]] = []
        for place, hidden in enumerate(pruned):
            inputs: list[Tensor] = []
            given: list[Tensor] = []
            stop = None if one.arrives or not place else output  # the first prompt shows how often the layer runs
            after = self._run(number, place, hidden, removal, {one.site: inputs, output: given}, stop)
            target, got = targets[place], [after] if one.arrives else given
            if len(inputs) != 1 or len(target) != 1 or inputs[0].shape[:-1] != target[0].shape[:-1]:
                found.irregular.add(number)
                return {}, None
            if one.arrives:
                behind.append((after, inputs[0]))
            rows = inputs[0].flatten(0, -2).index_select(1, kept).double()
            if one.bias is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            lacking = (target[0].double() - got[0].double()).flatten(0, -2)
            root = _sizes(target).clamp_min(typical).rsqrt()[:, None]
            rows, lacking, held = rows * root, lacking * root, self._held_back(place, len(rows))
            fit.add(rows[held:], lacking[held:])
            back.add(rows[:held], lacking[:held])
        found.short += fit.tokens + back.tokens < features
        ridge = chosen_ridge(fit, back, near=near)
        fit.join(back)
        change = None if ridge is None else fit.change(ridge)
        values: Values = {}
        if ridge is None or change is None:
            found.unchanged += 1
        else:
            found.ridges[one.weight] = ridge
            values = one.changed(change, kept, self._dtype)
        return values, [one.moved(after, inputs, values) for after, inputs in behind] or None

    def _held_back(self, place: int, tokens: int) -> int:
        """How many tokens of a prompt choose the ridge: all of every fourth prompt, or of the last of two or three
        prompts, or the first quarter of a single prompt."""
        if len(self._prompts) == 1:
            return tokens // HELD_BACK
        return tokens if place % HELD_BACK == min(HELD_BACK, len(self._prompts)) - 1 else 0


@dataclass(frozen=True)
class _Wanted:
    """Outputs of the dense model at one block, one per prompt: of the block, and of the layers to be refitted."""

    after: list[Tensor]
    own: list[Own]


class _SeenError(Exception):
    """Stops a block once the wanted site has been seen."""


def _sizes(target: Sequence[Tensor]) -> Tensor:
    """|y|^2 of every token, (n,)."""
    return torch.cat([y.double().square().sum(dim=-1).flatten() for y in target])


def _typical(targets: Sequence[Sequence[Tensor]]) -> float:
    """The median of |y|^2 over all tokens; 1 where it is zero."""
    return float(torch.cat([_sizes(target) for target in targets]).median()) or 1.0


def _output(one: Consumer) -> Site:
    """The site of the layer's output."""
    return Site("ffn", one.site.module, "output", 1)
