"""The criteria in use, each as its authors define it: a score for every neuron and head, small where it may go.

x: inputs of a down or output projection, W (outputs, inputs) its weights; a neuron is one input, a head several. A
criterion made for one layer is used in two ways: as published, with the same share of every layer, and with all terms
of the model in one order, by score for each parameter that a term holds. Which of the two did better on the held-out
windows is shown, which favours the criterion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.criteria.activity import Moments, Slopes
from benchmarks.criteria.layers import Keep, Layer

Scores = list[Tensor]  # of every layer, (terms,) float64
PlaceInLayer = tuple[int, int]  # number of the layer, number of the term in it


@dataclass(frozen=True)
class Seen:
    """What the calibration windows showed."""

    layers: Sequence[Layer]
    moments: Sequence[Moments]
    slopes: Sequence[Slopes] | None
    """Of the next-token loss; None for a model without one."""
    entropy: Sequence[Slopes] | None
    """Of the entropy of the next-token distribution."""


def _columns(layer: Layer) -> Tensor:
    """W by term, (terms, inputs of one, outputs) float64."""
    return layer.linear.weight.detach().double().T.reshape(layer.terms, layer.width, -1)


def _by_term(layer: Layer, values: Tensor) -> Tensor:
    """(inputs,) to (terms, inputs of one)."""
    return values.reshape(layer.terms, layer.width)


def magnitude(seen: Seen) -> Scores:
    """Σ_i |W_:,i|₂ over the term's inputs: what FLAP's authors compare with as magnitude-sp."""
    return [_columns(layer).norm(dim=2).sum(dim=1) for layer in seen.layers]


def activation_norm(seen: Seen) -> Scores:
    """|X_t|_F |W_t|_F of the term's inputs over all tokens and of its weights."""
    pairs = zip(seen.layers, seen.moments, strict=True)
    return [_by_term(a, m.squares).sum(dim=1).sqrt() * _columns(a).flatten(1).norm(dim=1) for a, m in pairs]


def wanda_sp(seen: Seen) -> Scores:
    """Σ_i Σ_o |W_oi| |X_i|₂: Wanda (Sun et al. 2023) summed over a structure (An et al. 2024, Wanda-sp)."""
    pairs = zip(seen.layers, seen.moments, strict=True)
    return [(_columns(a).abs().sum(dim=2) * _by_term(a, m.squares).sqrt()).sum(dim=1) for a, m in pairs]


def taylor(seen: Seen) -> Scores:
    """Mean over prompts of |Σ g x|, g the slope of the loss (Molchanov et al. 2019; LLM-Pruner, Ma et al. 2023)."""
    assert seen.slopes is not None
    return [one.of_sums for one in seen.slopes]


def entropy_taylor(seen: Seen) -> Scores:
    """Σ |g x|, g the slope of the mean entropy of the model's own distribution (HFPrune, Zhu et al. 2026)."""
    assert seen.entropy is not None
    return [one.of_each for one in seen.entropy]


def flap(seen: Seen) -> Scores:
    """Fluctuation of the input, weighted: S_i = Var(x_i) |W_:,i|₂² (An et al. 2024, Eq. 5), squared for attention,
    standardised over the inputs of each layer; a head has the mean of its inputs (AL-AM in the authors' code). What is
    removed is replaced by its mean, as a bias. Scores of all layers are compared as they are."""
    found = []
    for layer, one in zip(seen.layers, seen.moments, strict=True):
        score = (_by_term(layer, one.variance) * _columns(layer).square().sum(dim=2)).flatten()
        score = score.square() if layer.kind == "head" else score
        found.append(_by_term(layer, (score - score.mean()) / score.std()).mean(dim=1))
    return found


# -- which terms go ------------------------------------------------------------------------------------------


def same_share(layers: Sequence[Layer], scores: Scores) -> Scores:
    """Every term's place among those of its layer, (k + 1/2) / terms: in this order layers lose equal shares."""
    return [(one.argsort(stable=True).argsort().double() + 0.5) / len(one) for one in scores]


def for_parameters(layers: Sequence[Layer], scores: Scores) -> Scores:
    """Score a parameter."""
    return [one / layer.parameters for layer, one in zip(layers, scores, strict=True)]


def as_they_are(layers: Sequence[Layer], scores: Scores) -> Scores:
    """One order of all terms."""
    return scores


def neurons_first(layers: Sequence[Layer], scores: Scores) -> Scores:
    """The same share of every FFN; heads only once every neuron is gone."""
    found = same_share(layers, scores)
    return [one + 2.0 * (layer.kind == "head") for layer, one in zip(layers, found, strict=True)]


def cut(layers: Sequence[Layer], scores: Scores, parameters: float) -> Keep:
    """What stays when the terms of least score go, as many as bring what is removed nearest to `parameters`; of equal
    scores the first layer's goes first."""
    each = torch.cat([torch.full((layer.terms,), layer.parameters, dtype=torch.float64) for layer in layers])
    order = torch.cat(scores).argsort(stable=True)
    gone = torch.cat([torch.zeros(1, dtype=torch.float64), each[order].cumsum(dim=0)])
    count = int((gone - parameters).abs().argmin())
    keep = torch.ones(len(each), dtype=torch.bool)
    keep[order[:count]] = False
    return list(keep.split([layer.terms for layer in layers]))


Allocation = Callable[[Sequence[Layer], Scores], Scores]


@dataclass(frozen=True)
class Baseline:
    """A criterion and how it is used."""

    name: str
    score: Callable[[Seen], Scores]
    allocations: Mapping[str, Allocation]
    loss: bool = False
    """Whether it needs a next-token distribution."""


BOTH: Mapping[str, Allocation] = {"same share of layers": same_share, "one order": for_parameters}
BASELINES = (
    Baseline("magnitude", magnitude, BOTH),
    Baseline("activation x norm", activation_norm, BOTH),
    Baseline("Wanda-sp", wanda_sp, BOTH),
    Baseline("FLAP", flap, {"one order": as_they_are}),
    Baseline("Taylor", taylor, BOTH, loss=True),
    Baseline(
        "entropy-Taylor (HFPrune)", entropy_taylor, {"FFNs alone": neurons_first, **BOTH}, loss=True,
    ),
)  # fmt: skip
