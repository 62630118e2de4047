"""Effect on the prediction of parts of b's dynamic parameters, or of its stream, put into a's pass one at a time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.compare.captured import Captured, capture, of_kinds, require_room
from duat_cli.analysis.inspect.run import chosen
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.errors import InputError, UnsupportedModelError, needed
from duat_cli.kinds import Patched
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import relative_error, rounding_for, tolerance_for
from duat_cli.models.budgets import ABLATION_BYTES, PATCH_VECTORS, waiting_bytes
from duat_cli.models.discovery.causality import HeadTest, by_row, head_output
from duat_cli.models.discovery.modality import Given, placed
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.instrument.held import Held
from duat_cli.models.sweep.passes import RecordingPass
from duat_cli.models.sweep.patches import Patch, PatchedPass
from duat_cli.models.value_path.operator import whole_rows
from duat_cli.results.base import finite
from duat_cli.results.compare.patching import (
    BlockPatch,
    HeadPatch,
    PatchedPair,
    PatchEffect,
    Patching,
    TokenPatch,
)
from duat_cli.statistics.divergence import kl

PARTS: dict[str, tuple[str, ...]] = {
    "H": ("attention",),
    "norms": ("norms",),
    "ffn": ("units",),
    "cross": ("cross",),
    "together": ("attention", "norms", "units", "cross"),
}
"""Part of a block that is replaced by b's, one at a time -> the fields of `Held` that it consists of."""
MISSING = {
    "H": "its tokens are mixed without attention weights",
    "norms": "it has no norm whose scale is known",
    "ffn": "it has no FFN",
    "cross": "it has no cross-attention",
    "together": "it has neither attention weights, nor norms, nor an FFN",
}
SAME = "the difference in logits is the same behind a and behind b, but for rounding"
NO_THIRD = "each pair needs another whose second prompt is a third one of as many tokens, to be put there instead"
ALL = slice(None)
UNSOUND = "with it the model's output is not finite"
UNMOVED = "the predictions are alike, or infinitely far from each other"


@dataclass(frozen=True)
class Place:
    """The part that is replaced by b's, in one block or in all (None)."""

    block: int | None
    part: str
    number: int = 0  # number of the head or token


Trial = Sequence[PatchedPass | None]
"""One pass for every pair; None where the patch changes nothing."""


class Target:
    """Predictions of two prompts, of tokens or classes; measures how far given logits have moved from a's to b's."""

    def __init__(self, before: Tensor, after: Tensor, tokens: tuple[int, int] | None = None) -> None:
        """before, after: logits behind a and b, (vocabulary,). tokens: the token whose logit is subtracted, and the one
        whose logit is followed; None: those whose probability falls and rises most from a to b."""
        self._after, self.given = after, tokens is not None
        if tokens is not None and max(tokens) >= len(after):
            raise InputError(f"--patch: token {max(tokens)} is none of the {len(after)} that the model puts out")
        gained = after.double().softmax(dim=0) - before.double().softmax(dim=0)
        self.tokens = (int(gained.argmin()), int(gained.argmax())) if tokens is None else tokens
        self.ends = self.of(before), self.of(after)
        self.rounding = rounding_for(after.dtype) * float(torch.stack([before, after]).double().abs().max())

    def of(self, logits: Tensor) -> Tensor:
        """Difference of the two tokens' logits, and KL(b || logits) in nats, as (2,) float64."""
        first, second = self.tokens
        wide = logits.double()
        return torch.stack([wide[second] - wide[first], kl(self._after[None], logits[None])[0]]).cpu()


class Patcher:
    """Recorded passes of prompts, in pairs with as many tokens, and the patched passes between them."""

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Prompt],
        pairs: Sequence[tuple[int, int]],
        what: Patched,
        layers: frozenset[int] | None,
        progress: Progress,
        answers: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """answers: for every pair, the tokens, or classes, of its `Target`. Raises UnsupportedModelError for a model
        that predicts neither a next token nor a text's class."""
        require_room("--patch", session, prompts, PATCH_VECTORS)
        self._session, self._pairs, self._what, self._progress = session, pairs, what, progress
        self._done = self._total = 0
        self._captured: list[Captured] = []
        if what != "tokens":
            self._captured = capture(session, prompts, progress, units=True)
        model, self._structure = session.loaded.headed, session.structure
        self._tolerance = tolerance_for(model.dtype)
        self._layers = chosen(layers, len(self._structure.calls))
        device, like = session.loaded.device, session.loaded.like
        given = [placed(prompt.given, device, model.dtype) for prompt in prompts]
        self._forwards = [functools.partial(_last_logits, model, one) for one in given]
        self._thirds = third_texts(prompts, pairs)
        head = HeadTest(model, self._structure.stack, device, like)
        session.together(head.passes)
        why_not = head.why_no_next_token()
        if why_not is not None and head.classes != "text":
            raise UnsupportedModelError(f"--patch: {why_not}, so there is no one prediction to move")
        self._records = [RecordingPass(self._structure, forward) for forward in self._forwards]
        session.together(self._records)
        self._targets = [
            Target(self._records[a].output, self._records[b].output, None if answers is None else answers[number])
            for number, (a, b) in enumerate(pairs)
        ]
        self._rise = _rise(self._targets)

    def report(self, said: Callable[[int], str], texts: Sequence[str]) -> Patching:
        """The report. said: text of a token id or a class number; texts: tokens of the first pair's first prompt."""
        known = [self._known(*pair) for pair in self._pairs]
        seconds, thirds = [b for _, b in self._pairs], self._thirds
        trials = {
            place: (self._trial(place, seconds), None if thirds is None else self._trial(place, thirds))
            for place in self._places()
        }
        passes = [one for both in trials.values() for trial in both for one in trial or () if one is not None]
        self._total = len(passes)
        self._run(known)
        error = self._error([one.output for one in known])
        self._run(sorted(passes, key=lambda one: one.start))
        found = {place: self._effect(place, texts, *both) for place, both in trials.items()}
        return Patching(
            what=self._what,
            pairs=[_pair(*pair, target, said) for pair, target in zip(self._pairs, self._targets, strict=True)],
            blocks=[_block(number, found) for number in self._layers],
            whole=_block(None, found) if self._what == "blocks" else None,
            own_error=error,
            tolerance=self._tolerance,
            holds=error <= self._tolerance,
        )

    def _run(self, passes: Sequence[PatchedPass]) -> None:
        """Runs passes, ordered by where they start. As many as fit in memory go side by side through each block."""
        tokens, width = self._records[0].calls[0].before.shape[1:]
        size = max(1, ABLATION_BYTES // waiting_bytes(tokens, width))
        for first in range(0, len(passes), size):
            self._session.together(passes[first : first + size])

    def _places(self) -> Iterator[Place]:
        """All parts to be replaced by b's, one after another."""
        if self._what == "blocks":
            parts = [part for part in PARTS if part != "cross" or self._session.loaded.pair is not None]
            yield from itertools.starmap(Place, itertools.product([*self._layers, None], parts))
            return
        for block in self._layers:
            count = self._records[0].calls[block].before.shape[1]
            if self._what == "heads":
                count = sum(rows.heads for rows in needed(self._captured[0][block].attention))
            yield from (Place(block, self._what, number) for number in range(count))

    def _known(self, a: int, b: int) -> PatchedPass:
        """A pass with known logits: given all of a's own parts they are a's; given every token of b they are b's."""
        if self._what != "tokens":
            return self._pass(a, self._held(a, self._layers, "together"), self._forwards[a])
        first = self._layers[0]
        return self._pass(a, Patch(stream={first: (ALL, self._records[b].calls[first].before)}), self._forwards[a])

    def _error(self, logits: Sequence[Tensor]) -> float:
        """Largest relative error of the known passes' logits. Raises UnsupportedModelError where with all tokens of b's
        stream they are not b's."""
        ends = [self._records[pair[self._what == "tokens"]].output for pair in self._pairs]
        error = max(map(relative_error, logits, ends))
        if self._what == "tokens" and not error <= self._tolerance:
            raise UnsupportedModelError(
                f"--patch tokens: with every token of b in front of block {self._layers[0]} the logits are not b's "
                f"(relative error {error:.1e}): blocks read more of the input than the stream; use --patch blocks"
            )
        return error

    def _trial(self, place: Place, sources: Sequence[int]) -> Trial:
        """Passes with one part patched. sources: for every pair, the prompt that the part comes from."""
        found = []
        for number, ((a, _), source) in enumerate(zip(self._pairs, sources, strict=True)):
            patch = self._patch(place, a, source)
            measured = functools.partial(self._measured, number)
            found.append(None if patch is None else self._pass(a, patch, measured))
        return found

    def _blocks_of(self, place: Place) -> list[int]:
        return self._layers if place.block is None else [place.block]

    def _patch(self, place: Place, a: int, source: int) -> Patch | None:
        if place.part == "tokens":
            assert place.block is not None
            row, other = slice(place.number, place.number + 1), self._records[source].calls[place.block].before
            if torch.equal(self._records[a].calls[place.block].before[:, row], other[:, row]):
                return None  # true of all tokens in front of the first that differs
            return Patch(stream={place.block: (row, other)})
        if place.part == "heads":
            assert place.block is not None
            own, other_block = self._captured[a][place.block], self._captured[source][place.block]
            return Patch({place.block: functools.partial(_with_head, own, other_block, place.number)})
        return None if self._missing(place) else self._held(source, self._blocks_of(place), place.part)

    def _missing(self, place: Place) -> bool:
        """Whether no block has that part; looked up in the first prompt, as all have the same parts."""
        blocks = [self._captured[0][block] for block in self._blocks_of(place)]
        return not any(getattr(block, kind) for block in blocks for kind in PARTS[place.part])

    def _held(self, source: int, blocks: Sequence[int], part: str) -> Patch:
        captured = self._captured[source]
        return Patch({block: functools.partial(of_kinds, captured[block], PARTS[part]) for block in blocks})

    def _pass(self, a: int, patch: Patch, forward: Callable[[], Tensor]) -> PatchedPass:
        return PatchedPass(self._structure, forward, self._records[a].calls, patch, self._session.weights)

    def _measured(self, number: int) -> Tensor:
        found = self._targets[number].of(self._forwards[self._pairs[number][0]]())
        self._done += 1
        self._progress(self._done, self._total, "patches")
        return found

    def _effect(self, place: Place, texts: Sequence[str], own: Trial, third: Trial | None) -> PatchEffect:
        kind: type[PatchEffect] = PatchEffect
        known: dict[str, Any] = {}
        if place.part == "heads":
            kind, known = HeadPatch, {"head": place.number}
        elif place.part == "tokens":
            kind, known = TokenPatch, {"token": place.number, "text": texts[place.number]}
        elif self._missing(place):
            return PatchEffect.absent(MISSING[place.part])
        moved, divergence = self._shares(own)
        null = None if third is None else self._shares(third)[0]
        apart = sum(float(target.ends[0][1]) for target in self._targets)
        why = UNSOUND if 0 < apart < math.inf else UNMOVED
        unmoved = SAME if why == UNSOUND and math.isnan(self._rise) else why
        others = {"effect": unmoved, "null": NO_THIRD if third is None else unmoved}
        return kind.explained(why, others, effect=moved, null=null, kl=divergence, **known)

    def _shares(self, trial: Trial) -> tuple[float | None, float | None]:
        """Shares of the way from a to b: of the difference in logits, and of the divergence; None if not finite."""
        starts = [target.ends[0] for target in self._targets]
        begin = torch.stack(starts)
        now = torch.stack([start if one is None else one.output for start, one in zip(starts, trial, strict=True)])
        moved = (now - begin)[:, 0].sum() / self._rise
        return finite(float(moved)), finite(float(1 - now[:, 1].sum() / begin[:, 1].sum()))


def _rise(targets: Sequence[Target]) -> float:
    """Change from a to b of the difference in logits, summed over pairs; NaN where it is no more than rounding."""
    rise = sum(float(target.ends[1][0] - target.ends[0][0]) for target in targets)
    return rise if abs(rise) > sum(target.rounding for target in targets) else math.nan


def third_texts(prompts: Sequence[Prompt], pairs: Sequence[tuple[int, int]]) -> list[int] | None:
    """For every pair, the second prompt of the next pair that is neither of its own two texts and has as many tokens;
    None where a pair has no such third text.

    Texts may be given twice, and a null made with one of the pair's own texts would say nothing.
    """
    found = []
    for number, pair in enumerate(pairs):
        others = (b for _, b in [*pairs[number + 1 :], *pairs[:number]])
        fitting = (b for b in others if prompts[b].input_ids.shape == prompts[pair[0]].input_ids.shape)
        third = next((b for b in fitting if not any(prompts[b].read == prompts[own].read for own in pair)), None)
        if third is None:
            return None
        found.append(third)
    return found


def _last_logits(model: Any, given: Given) -> Tensor:
    """Logits behind the last token, (vocabulary,), or of a whole input, (classes,)."""
    return by_row(head_output(model, given))[0, -1].clone()


def _with_head(own: Held, other: Held, head: int) -> Held:
    """H with one head taken from another prompt; heads are numbered through all attention calls of the block."""
    rows, before = [], 0
    for mine, theirs in zip(needed(own.attention), needed(other.attention), strict=True):
        here = head - before
        mixed = whole_rows(mine).clone()
        if 0 <= here < mine.heads:
            mixed[here] = whole_rows(theirs)[here]
        rows.append(StoredRows(mixed))
        before += mine.heads
    return Held(rows)


def _pair(a: int, b: int, target: Target, said: Callable[[int], str]) -> PatchedPair:
    (before, divergence), (after, _) = (end.tolist() for end in target.ends)
    first, second = map(said, target.tokens)
    return PatchedPair.explained(
        "it is not finite",
        a=a,
        b=b,
        token_a=first,
        token_b=second,
        given=target.given,
        before=finite(before),
        after=finite(after),
        kl=finite(divergence),
    )


def _block(number: int | None, found: dict[Place, PatchEffect]) -> BlockPatch:
    here = [(place.part, effect) for place, effect in found.items() if place.block == number]
    return BlockPatch(
        index=number,
        heads=[effect for _, effect in here if isinstance(effect, HeadPatch)],
        tokens=[effect for _, effect in here if isinstance(effect, TokenPatch)],
        **{part: effect for part, effect in here if part in PARTS},
    )
