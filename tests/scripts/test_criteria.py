"""The comparison of criteria in scripts/benchmarks: each against its definition on numbers that a hand can check."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from benchmarks.criteria.activity import cosines, entropy, moments, next_token, slopes
from benchmarks.criteria.baselines import (
    BASELINES,
    Scores,
    Seen,
    activation_norm,
    cut,
    entropy_taylor,
    flap,
    for_parameters,
    magnitude,
    neurons_first,
    same_share,
    taylor,
    wanda_sp,
)
from benchmarks.criteria.judging import Judge
from benchmarks.criteria.layers import (
    KINDS,
    Layer,
    keep_without,
    layers_of,
    removed_parameters,
    without,
    without_blocks,
)
from benchmarks.criteria.ours import Ours, prompts_of
from torch import Tensor, nn

from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.analysis.prune.terms.damage import Divergence, Loss
from duat_cli.loading.model.load import load
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import TermId, find_sites

NEURONS = torch.tensor([[1.0, 2, 0], [-1, 2, 4]])  # two tokens: Σ x² 2, 8, 16; means 0, 2, 2; variances 2, 0, 8
HEADS = torch.tensor([[1.0, 0, 3, 0], [1, 2, 3, 0]])  # Σ x² 2, 4, 18, 0; means 1, 1, 3, 0; variances 0, 2, 0, 0


def linear(weight: list[list[float]]) -> nn.Linear:
    made = nn.Linear(len(weight[0]), len(weight), bias=False)
    made.weight = nn.Parameter(torch.tensor(weight), requires_grad=False)
    return made


@pytest.fixture
def layers() -> list[Layer]:
    """Three neurons of one input each, column norms 5, 2, 1; two heads of two inputs, column norms 5, 1 and 2, 1."""
    down, out = linear([[3.0, 0, 1], [4, 2, 0]]), linear([[3.0, 0, 0, 1], [4, 1, 2, 0]])
    return [Layer(0, "neuron", down, 3, 10.0), Layer(0, "head", out, 2, 40.0)]


class Model(nn.Module):
    """Logits (1, tokens, 2): what the two layers give for NEURONS and HEADS, whatever the ids are."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.down, self.out = (layer.linear for layer in layers)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.down(NEURONS[None].clone()) + self.out(HEADS[None].clone()))


@pytest.fixture
def seen(layers: list[Layer]) -> Seen:
    """With slopes of the sum of all logits: those in the inputs are the column sums 7, 2, 1 and 7, 1, 2, 1."""

    def total(logits: Tensor, ids: Tensor) -> Tensor:
        return logits.sum()

    model, windows = Model(layers), torch.zeros(2, 2, dtype=torch.long)
    found = slopes(model, layers, windows, total)
    return Seen(layers, moments(model, layers, windows[:1]), found, found)


def close(found: Scores, neurons: list[float], heads: list[float]) -> None:
    for one, expected in zip(found, (neurons, heads), strict=True):
        torch.testing.assert_close(one, torch.tensor(expected, dtype=torch.float64))


def test_moments(seen: Seen) -> None:
    neurons, heads = seen.moments
    close([neurons.squares, heads.squares], [2, 8, 16], [2, 4, 18, 0])
    close([neurons.mean, heads.mean], [0, 2, 2], [1, 1, 3, 0])
    close([neurons.variance, heads.variance], [2, 0, 8], [0, 2, 0, 0])


def test_magnitude_is_the_sum_of_column_norms(seen: Seen) -> None:
    close(magnitude(seen), [5, 2, 1], [6, 3])


def test_activation_norm_is_norm_times_norm(seen: Seen) -> None:
    heads = [math.sqrt(2 + 4) * math.sqrt(25 + 1), math.sqrt(18) * math.sqrt(4 + 1)]
    close(activation_norm(seen), [math.sqrt(2) * 5, math.sqrt(8) * 2, 4.0], heads)


def test_wanda_sp_sums_weights_times_input_norms(seen: Seen) -> None:
    heads = [7 * math.sqrt(2) + 1 * 2, 2 * math.sqrt(18) + 0]
    close(wanda_sp(seen), [7 * math.sqrt(2), 2 * math.sqrt(8), 4.0], heads)


def test_flap_standardises_fluctuation_times_weight(seen: Seen) -> None:
    """Neurons 2 x 25, 0 x 4, 8 x 1; inputs of heads (2 x 1)² for the second and 0 for the others."""
    mean, std = 58 / 3, math.sqrt(((50 - 58 / 3) ** 2 + (58 / 3) ** 2 + (8 - 58 / 3) ** 2) / 2)
    of_input = [(value - 1) / 2 for value in (0, 4, 0, 0)]  # mean 1, standard deviation 2
    heads = [(of_input[0] + of_input[1]) / 2, (of_input[2] + of_input[3]) / 2]
    close(flap(seen), [(value - mean) / std for value in (50, 0, 8)], heads)


def test_taylor_sums_before_it_takes_the_size_and_hfprune_after(seen: Seen) -> None:
    close(taylor(seen), [abs(7 * (1 - 1)), 2 * (2 + 2), 1 * (0 + 4)], [7 * 2 + 1 * 2, 2 * 6])
    close(entropy_taylor(seen), [7 * (1 + 1), 2 * (2 + 2), 1 * 4], [7 * 2 + 1 * 2, 2 * 6])


def test_a_window_s_slopes_are_averaged(layers: list[Layer]) -> None:
    """A loss whose sign alternates from window to window does not cancel."""
    signs = iter([1.0, -1.0])

    def alternating(logits: Tensor, ids: Tensor) -> Tensor:
        return next(signs) * logits.sum()

    found = slopes(Model(layers), layers, torch.zeros(2, 2, dtype=torch.long), alternating)
    assert found[0].of_sums.tolist() == [0, 8, 4]


def test_losses() -> None:
    logits, ids = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([[3, 1, 4, 1, 5]])
    p = logits[0].double().softmax(dim=-1)
    assert float(entropy(logits, ids)) == pytest.approx(float(-(p * p.log()).sum(dim=-1).mean()))
    assert float(next_token(logits, ids)) == pytest.approx(-float(p[range(4), [1, 4, 1, 5]].log().mean()))


def test_shortgpt_s_cosine() -> None:
    """One block doubles its input, one turns it by a right angle."""

    class Turned(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (torch.stack([-x[..., 1], x[..., 0]], dim=-1),)

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    structure = SimpleNamespace(calls=[Doubled(), Turned()])

    def model(input_ids: Tensor) -> None:
        structure.calls[1](structure.calls[0](torch.randn(1, 3, 2)))

    found = cosines(structure, model, torch.zeros(2, 3, dtype=torch.long))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0], dtype=torch.float64), atol=1e-6, rtol=0)


# -- which terms go ------------------------------------------------------------------------------------------


def test_allocations(layers: list[Layer]) -> None:
    scores = [torch.tensor([5.0, 1, 2]), torch.tensor([30.0, 80])]
    close([s.double() for s in same_share(layers, scores)], [5 / 6, 1 / 6, 3 / 6], [1 / 4, 3 / 4])
    close([s.double() for s in for_parameters(layers, scores)], [0.5, 0.1, 0.2], [0.75, 2.0])
    close([s.double() for s in neurons_first(layers, scores)], [5 / 6, 1 / 6, 3 / 6], [9 / 4, 11 / 4])


@pytest.mark.parametrize(
    ("parameters", "neurons", "heads"),
    [(0, [True] * 3, [True] * 2), (14, [True, False, True], [True] * 2), (16, [True, False, False], [True] * 2),
     (60, [False] * 3, [False, True]), (1000, [False] * 3, [False] * 2)],
)  # fmt: skip
def test_a_cut_removes_nearest_to_what_was_asked_for(
    layers: list[Layer], parameters: float, neurons: list[bool], heads: list[bool]
) -> None:
    keep = cut(layers, [torch.tensor([0.5, 0.1, 0.2]), torch.tensor([0.75, 2.0])], parameters)
    assert [one.tolist() for one in keep] == [neurons, heads]
    gone = 10 * (3 - sum(neurons)) + 40 * (2 - sum(heads))
    assert removed_parameters(layers, keep) == gone


def test_duat_s_set_is_nearest_too(layers: list[Layer]) -> None:
    order = [TermId("neuron", 0, 2), TermId("head", 0, 1), TermId("neuron", 0, 0)]
    ours = Ours(SimpleNamespace(nested={"neuron,head": Nested(KINDS, order, [], None)}))  # type: ignore[arg-type]
    assert [ours.nearest(layers, wanted) for wanted in (12, 44, 1000)] == [order[:1], order[:2], order]
    assert [one.tolist() for one in keep_without(layers, order[:2])] == [[True, True, False], [True, False]]


def test_every_baseline_has_a_way_to_be_used() -> None:
    assert len({baseline.name for baseline in BASELINES}) == len(BASELINES) == 6
    assert all(baseline.allocations for baseline in BASELINES)


# -- removal and judgement -----------------------------------------------------------------------------------


def test_a_mean_in_place_of_an_input_is_a_bias(layers: list[Layer], seen: Seen) -> None:
    """FLAP's b = W (mean, of what is gone), beside W without these columns."""
    keep = [torch.tensor([True, False, True]), torch.tensor([False, True])]
    with without(layers, keep, [one.mean for one in seen.moments]):
        found = Model(layers)(torch.zeros(1, 2)).logits[0]
    down, out = (layer.linear.weight for layer in layers)
    kept = NEURONS[:, [0, 2]] @ down[:, [0, 2]].T + HEADS[:, 2:] @ out[:, 2:].T
    bias = down[:, 1] * 2.0 + out[:, :2] @ torch.tensor([1.0, 1.0])
    torch.testing.assert_close(found, kept + bias)


def test_removal_and_damage_are_those_of_the_package() -> None:
    """Hooks, divergence and loss of the comparison are its own; the package ablates and measures in another way."""
    loaded = load(None)
    structure = discover(loaded.model)
    sites, layers = find_sites(structure), layers_of(structure)
    assert [(layer.kind, layer.terms) for layer in layers] == [("neuron", 384), ("head", 6)] * 6
    blocks = sum(p.numel() for call in structure.calls for p in call.parameters())
    norms = 6 * 2 * 192
    assert sum(layer.terms * layer.parameters for layer in layers) == blocks - norms
    windows = torch.randint(10, 2000, (2, 12), generator=torch.Generator().manual_seed(1))
    judge, ablator = Judge(loaded.model, windows), Ablator(structure, sites, Divergence(loaded.model))
    terms = [TermId("neuron", 1, k) for k in range(100)] + [TermId("head", 4, 5), TermId("head", 0, 0)]
    with without(layers, keep_without(layers, terms)):
        found = judge.now()
    with without_blocks(structure, [2]):
        shorter = judge.now()
    assert found.loss is not None
    assert judge.dense.loss is not None
    assert judge.dense.damage.abs().max() < 1e-9
    nll = Ablator(structure, sites, Loss(loaded.model))
    for place, prompt in enumerate(prompts_of(windows)):
        recorded = ablator.record(prompt.input_ids)
        gone = ablator.removals(terms)
        assert float(found.damage[place]) == pytest.approx(ablator.damage(recorded, prompt.input_ids, gone), rel=1e-4)
        change = float(found.loss[place] - judge.dense.loss[place])
        assert change == pytest.approx(nll.damage(recorded, prompt.input_ids, gone), abs=1e-5)
        block = ablator.damage(recorded, prompt.input_ids, ablator.removals([TermId("block", 2)]))
        assert float(shorter.damage[place]) == pytest.approx(block, rel=1e-4)
    assert float(judge.now().damage.max()) < 1e-9
