"""One model, all methods, all shares: what each does to the held-out windows, with paired intervals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common import minilm_path
from benchmarks.criteria import texts
from benchmarks.criteria.activity import cosines, entropy, moments, next_token, slopes
from benchmarks.criteria.baselines import BASELINES, Seen, cut
from benchmarks.criteria.judging import Judge, Judged
from benchmarks.criteria.layers import (
    KINDS,
    Keep,
    Layer,
    keep_without,
    layers_of,
    removed_parameters,
    without,
    without_blocks,
)
from benchmarks.criteria.ours import run
from benchmarks.criteria.pruning_peer import PEER, torch_pruning
from benchmarks.criteria.texts import Texts, texts_of
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.models.discovery.structure import ModelStructure, discover

SHARES = (0.1, 0.2, 0.3, 0.5)
BLOCKS = (1, 2, 3)
OURS, ROUNDS, REPAIRED = "duat", "duat, 4 rounds", "duat, repaired"


@dataclass(frozen=True)
class Outcome:
    """A method at one share."""

    method: str
    variant: str
    """How it was used, where that is a choice."""
    wanted: float
    """Share of the blocks' parameters, or number of blocks."""
    removed: float
    """Share of the blocks' parameters that was really removed."""
    judged: Judged
    means: bool = False
    """Whether the mean of what is removed stands in for it."""

    @property
    def damage(self) -> float:
        return float(self.judged.damage.mean())


@dataclass
class Comparison:
    """Of one model."""

    name: str
    dense: Judged
    windows: tuple[int, int]
    """For calibration, held out."""
    parts: list[Outcome] = field(default_factory=list)
    """Neurons and heads."""
    blocks: list[Outcome] = field(default_factory=list)

    def bare(self) -> list[Outcome]:
        """Neurons and heads, nothing in their place."""
        return [one for one in self.parts if not one.means]

    def filled(self) -> list[Outcome]:
        """With means in their place, or a repair."""
        return [one for one in self.parts if one.means]


def best(outcomes: Sequence[Outcome], method: str, wanted: float) -> Outcome | None:
    """The variant that did the least damage."""
    mine = [one for one in outcomes if (one.method, one.wanted) == (method, wanted)]
    return min(mine, key=lambda one: one.damage, default=None)


def compare(name: str, *, rounds: int, peer: bool) -> Comparison:
    """The demo or MiniLM. rounds: of duat's second row, 1 for none. peer: with torch-pruning."""
    loaded, documents = _model(name)
    found = texts_of(load_tokenizer(loaded.files.path), documents)
    return _Work(name, loaded, found).run(rounds, peer)


def _model(name: str) -> tuple[LoadedModel, list[str]]:
    if name == "demo":
        return load(None), texts.library()
    return load(str(minilm_path())), texts.reference()


class _Work:
    def __init__(self, name: str, loaded: LoadedModel, found: Texts) -> None:
        self.loaded, self.texts = loaded, found
        self.structure: ModelStructure = discover(loaded.model)
        self.layers: list[Layer] = layers_of(self.structure)
        self.whole = float(sum(p.numel() for p in {p for call in self.structure.calls for p in call.parameters()}))
        self.judge = Judge(loaded.model, found.held_out)
        self.moments = moments(loaded.model, self.layers, found.calibration)
        self.means = [one.mean for one in self.moments]
        self.found = Comparison(name, self.judge.dense, (len(found.calibration), len(found.held_out)))

    def run(self, rounds: int, peer: bool) -> Comparison:
        self._baselines()
        self._ours(rounds)
        self._ours_with_means()
        self._blocks()
        if peer:
            self._peer()
        return self.found

    def _add(
        self, method: str, variant: str, wanted: float, removed: float, judged: Judged, *, means: bool = False
    ) -> None:
        place = self.found.blocks if wanted in BLOCKS else self.found.parts
        place.append(Outcome(method, variant, wanted, removed / self.whole, judged, means))
        how = f"{variant}, means" if means else variant
        print(f"{self.found.name}: {method}, {how}: {wanted:g}: {place[-1].damage:.4f}", file=sys.stderr, flush=True)

    def _add_set(self, method: str, variant: str, wanted: float, keep: Keep, stands_in: Sequence[bool]) -> None:
        """A set of neurons and heads with nothing in their place, with their means, or both."""
        for means in stands_in:
            with without(self.layers, keep, self.means if means else None):
                removed = removed_parameters(self.layers, keep)
                self._add(method, variant, wanted, removed, self.judge.now(), means=means)

    def _baselines(self) -> None:
        model, layers, windows, language = (
            self.loaded.model, self.layers, self.texts.calibration, self.judge.language,
        )  # fmt: skip
        seen = Seen(
            layers,
            self.moments,
            slopes(model, layers, windows, next_token) if language else None,
            slopes(model, layers, windows, entropy) if language else None,
        )
        for baseline in BASELINES:
            if baseline.loss and not language:
                continue
            scores = baseline.score(seen)
            for variant, allocation in baseline.allocations.items():
                for share in SHARES:
                    keep = cut(layers, allocation(layers, scores), share * self.whole)
                    self._add_set(baseline.name, variant, share, keep, (False, True))

    def _ours(self, rounds: int) -> None:
        one = run(self.loaded, self.texts.calibration, max(SHARES), KINDS)
        for share in SHARES:
            terms = one.nearest(self.layers, share * self.whole)
            keep = keep_without(self.layers, terms)
            self._add_set(OURS, "", share, keep, (False,))
            repaired = one.repaired(terms)  # while the model is whole: its outputs are what is fitted
            with repaired.in_place(), without(self.layers, keep):
                self._add(REPAIRED, "", share, removed_parameters(self.layers, keep), self.judge.now(), means=True)
        for share in SHARES if rounds > 1 else ():
            one = run(self.loaded, self.texts.calibration, share, KINDS, rounds)
            keep = keep_without(self.layers, one.nearest(self.layers, share * self.whole))
            self._add_set(ROUNDS, "", share, keep, (False,))

    def _ours_with_means(self) -> None:
        one = run(self.loaded, self.texts.calibration, max(SHARES), KINDS, means=True)
        for share in SHARES:
            keep = keep_without(self.layers, one.nearest(self.layers, share * self.whole))
            self._add_set(OURS, "", share, keep, (True,))

    def _blocks(self) -> None:
        """ShortGPT takes the blocks whose input and output are most alike (Men et al. 2024, Block Influence)."""
        similar = cosines(self.structure, self.loaded.model, self.texts.calibration).argsort(descending=True).tolist()
        one = run(self.loaded, self.texts.calibration, 0.5, ("block",))
        for count in BLOCKS:
            with without_blocks(self.structure, similar[:count]):
                self._add("ShortGPT", "", count, self._of_blocks(similar[:count]), self.judge.now())
            terms = one.order[:count]
            gone, repaired = [term.block for term in terms], one.repaired(terms)
            with without_blocks(self.structure, gone):
                self._add(OURS, "", count, self._of_blocks(gone), self.judge.now())
                with repaired.in_place():
                    self._add(REPAIRED, "", count, self._of_blocks(gone), self.judge.now())

    def _of_blocks(self, gone: Sequence[int]) -> float:
        return float(sum(p.numel() for number in gone for p in self.structure.calls[number].parameters()))

    def _peer(self) -> None:
        found = torch_pruning(self.loaded.files.path, self.texts, self.judge, SHARES)
        for (importance, share), (judged, removed) in found.items():
            self._add(PEER.replace("==", " "), importance, share, removed, judged)
