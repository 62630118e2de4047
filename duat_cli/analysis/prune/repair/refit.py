"""Repair of a pruned model: what reads the terms that stay is refitted, block after block, to the dense model's output.

All calibration prompts stand in front of a block twice: as the dense model and as the model that is pruned and already
repaired up to there. The dense block runs; then each layer of the block that reads neurons or heads gets

    W <- W_K + (X_KᵀX_K + λ I)⁻¹ X_Kᵀ R

with X_K what the pruned model feeds it, and R what is missing: the dense layer's output less the layer's own; of a
layer whose output is in the block's as it is, the dense block's output less the block's own, so that it also makes good
what was lost in front of it. (An attention layer that did so would repair what the FFN behind it is about to.) Nothing
but sums over tokens is kept of X and R. λ is the one that leaves least on prompts that were held back, and no change is
one of the choices; with that λ all tokens are fitted.

A token counts 1 / max(|y|^2, its median over tokens), y what the dense model gives there: what is left is relative.
Else the few tokens with massive activations (Sun et al. 2024; BERT's [CLS] has 96 % of |R|^2 in a layer of MiniLM)
alone would be fitted, at the cost of all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.analysis.prune.repair.consumers import Consumer
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.edits.exchanged import exchanged
from duat_cli.models.instrument.calls import hidden_of
from duat_cli.models.sweep.passes import BlockCall, Removal, Removals
from duat_cli.models.terms.sites import Site, watching
from duat_cli.operators.refit import Moments, chosen_ridge

HELD_BACK = 4  # one prompt, or token, in so many chooses the ridge
Values = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class Calls:
    """What the blocks are called with under one prompt, beside their hidden states, and the first hidden states."""

    first: Tensor
    arguments: Sequence[tuple[Sequence[Any], dict[str, Any]]]

    @classmethod
    def of(cls, structure: ModelStructure, calls: Sequence[BlockCall]) -> Calls:
        """Of a recorded pass, whose other hidden states are let go."""
        empty = torch.empty(0)
        kept = [structure.block(k).parts.hidden.put(c.args, c.kwargs, empty) for k, c in enumerate(calls)]
        return cls(calls[0].before, kept)


@dataclass
class Refit:
    """The new weights of one set, and how they came about."""

    values: Values = field(default_factory=dict)
    """Parameter -> what it holds."""
    ridges: list[float] = field(default_factory=list)
    """Of every layer that was refitted."""
    unchanged: int = 0
    """Layers that every refit would have made worse on the prompts held back."""
    short: int = 0
    """Layers with more inputs than there are tokens."""
    irregular: set[int] = field(default_factory=set)
    """Blocks with a layer that does not run once for every token, as a routed one does not: it is left as it is."""


class Refitting:
    """Repairs the sets of one model with the same calibration prompts."""

    def __init__(
        self,
        structure: ModelStructure,
        consumers: Mapping[int, Sequence[Consumer]],
        prompts: Sequence[Calls],
        dtype: torch.dtype,
    ) -> None:
        """consumers: of every block call. prompts: at least one. dtype: that the new weights are rounded to."""
        self._structure, self._consumers, self._prompts, self._dtype = structure, consumers, prompts, dtype
        self.tokens = sum(prompt.first.shape[1] for prompt in prompts)

    @torch.no_grad()
    def refit(self, removals: Removals, tick: Callable[[int, int], None]) -> Refit:
        """The repair of a set. The model is as it was, afterwards."""
        found, first = Refit(), min(removals)
        dense = [prompt.first for prompt in self._prompts]
        for number in range(first):
            dense = [self._run(number, place, hidden, None) for place, hidden in enumerate(dense)]
        pruned, count = list(dense), len(self._structure.calls)
        with contextlib.ExitStack() as stack:
            for number in range(first, count):
                tick(number - first, count - first)
                removal = removals.get(number)
                here = [one for one in self._consumers[number] if not one.silent(removal)]
                wanted = self._dense(number, dense, here)
                for one in here:
                    values = self._layer(number, one, removal, pruned, wanted, found)
                    stack.enter_context(exchanged(values))
                    found.values |= values
                dense = wanted.after
                pruned = [self._run(number, place, hidden, removal) for place, hidden in enumerate(pruned)]
        return found

    def _run(
        self, number: int, place: int, hidden: Tensor, removal: Removal | None, watch: Mapping[Site, list[Tensor]] = {}
    ) -> Tensor:
        """One block on one prompt; what the sites in `watch` hold is put into their lists."""

        def see(site: Site, value: Tensor, index: Tensor | None) -> None:
            watch[site].append(value.detach().clone())

        parts, before = self._structure.block(number).parts, hidden.clone()  # blocks may write to it
        args, kwargs = parts.hidden.put(*self._prompts[place].arguments[number], before)
        with contextlib.ExitStack() as stack:
            if removal is not None:  # first: what is seen then is what is left
                stack.enter_context(watching(list(removal.masks), removal.edit))
            stack.enter_context(watching(list(watch), see))
            after = hidden_of(parts.module(*args, **kwargs), hidden)
        return removal.bridge(hidden) if removal is not None and removal.whole else after

    def _dense(self, number: int, dense: Sequence[Tensor], here: Sequence[Consumer]) -> _Wanted:
        own: list[dict[Consumer, list[Tensor]]] = []
        after = []
        for place, hidden in enumerate(dense):
            own.append({one: [] for one in here if not one.arrives})
            watch = {_output(one): kept for one, kept in own[-1].items()}
            after.append(self._run(number, place, hidden, None, watch))
        return _Wanted(after, own)

    def _layer(
        self,
        number: int,
        one: Consumer,
        removal: Removal | None,
        pruned: Sequence[Tensor],
        wanted: _Wanted,
        found: Refit,
    ) -> Values:
        """The layer's new weights; none where nothing is left of it, or nothing helps."""
        kept = one.kept(removal)
        features = len(kept) + (one.bias is not None)
        if not len(kept):
            return {}
        outputs = one.weight.shape[1 - one.axis]
        bias = one.bias is not None
        fit, back = (Moments(features, outputs, one.weight.device, bias=bias) for _ in range(2))
        targets = [[whole] if one.arrives else own[one] for whole, own in zip(wanted.after, wanted.own, strict=True)]
        typical = _typical(targets)
        for place, hidden in enumerate(pruned):
            inputs: list[Tensor] = []
            given: list[Tensor] = []
            after = self._run(number, place, hidden, removal, {one.site: inputs, _output(one): given})
            target, got = targets[place], [after] if one.arrives else given
            if len(inputs) != 1 or len(target) != 1 or inputs[0].shape[:-1] != target[0].shape[:-1]:
                found.irregular.add(number)
                return {}
            rows = inputs[0].flatten(0, -2).index_select(1, kept).double()
            if one.bias is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            lacking = (target[0].double() - got[0].double()).flatten(0, -2)
            root = _sizes(target).clamp_min(typical).rsqrt()[:, None]
            rows, lacking, held = rows * root, lacking * root, self._held_back(place, len(rows))
            fit.add(rows[held:], lacking[held:])
            back.add(rows[:held], lacking[:held])
        found.short += fit.tokens + back.tokens < features
        ridge = chosen_ridge(fit, back)
        fit.join(back)
        change = None if ridge is None else fit.change(ridge)
        if ridge is None or change is None:
            found.unchanged += 1
            return {}
        found.ridges.append(ridge)
        return one.changed(change, kept, self._dtype)

    def _held_back(self, place: int, tokens: int) -> int:
        """How many tokens of a prompt choose the ridge: all of every fourth prompt, or of the last of two or three. One
        prompt alone gives its first tokens."""
        if len(self._prompts) == 1:
            return tokens // HELD_BACK
        return tokens if place % HELD_BACK == min(HELD_BACK, len(self._prompts)) - 1 else 0


@dataclass(frozen=True)
class _Wanted:
    """What the dense model gives at one block, a prompt: the block's output, and that of layers to be refitted."""

    after: list[Tensor]
    own: list[dict[Consumer, list[Tensor]]]


def _sizes(target: Sequence[Tensor]) -> Tensor:
    """|y|^2 of every token, (n,)."""
    return torch.cat([y.double().square().sum(dim=-1).flatten() for y in target])


def _typical(targets: Sequence[Sequence[Tensor]]) -> float:
    """The median of |y|^2 over all tokens; 1 where it is zero."""
    return float(torch.cat([_sizes(target) for target in targets]).median()) or 1.0


def _output(one: Consumer) -> Site:
    """Where the layer's output is seen."""
    return Site("ffn", one.site.module, "output", 1)
