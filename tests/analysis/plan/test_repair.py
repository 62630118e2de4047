"""What a repair takes, against tensors that are there and torch's own count."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from duat_cli.analysis.plan.memory import peak
from duat_cli.analysis.plan.repair import SETS, SOLVED, SUMS, repairing, solving
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.plan.terms import size_of
from duat_cli.analysis.plan.work import operations
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.operators.refit import RIDGES as TRIED
from duat_cli.operators.refit import Moments

REPAIR = PruneOptions(kinds=("neuron",), repair=True)


@pytest.fixture
def shape() -> Shape:
    return shape_of(inspect_folder(demo_path()), "float32")


def test_the_sums_and_the_new_weights_are_those_of_the_layers(shape: Shape) -> None:
    found = {one.what: one.bytes for one in repairing(shape, Task("prune-bound", (60, 40), pruning=REPAIR))}
    sums = Moments(384, 192, torch.device("cpu"))
    assert found["sums over tokens of a layer"] == SUMS * (sums.gram.nbytes + sums.cross.nbytes)
    assert found["new weights of sets"] == SETS * 6 * (192 * 384 + 192 * 192) * 4
    assert len(TRIED) <= SOLVED


def test_calibration_stands_in_place_of_the_prompts(shape: Shape) -> None:
    own, other = (Task("prune-bound", (60,), calibration=given, pruning=REPAIR) for given in ((), (60, 60)))
    assert size_of(repairing(shape, other)) > size_of(repairing(shape, own))
    plain = Task("prune-bound", (60,), pruning=PruneOptions(kinds=("neuron",)))
    assert operations(shape, plain) < operations(shape, own) < operations(shape, other)
    assert size_of(peak(shape, plain, "resident")) <= size_of(peak(shape, own, "resident"))
    large = Task("prune-bound", (60,), calibration=(200000,), pruning=REPAIR)
    assert size_of(peak(shape, large, "resident")) > 2 * size_of(peak(shape, plain, "resident"))
    assert size_of(peak(shape, large, "streamed")) == size_of(peak(shape, plain, "streamed"))


def test_products_of_the_sums_are_counted(shape: Shape) -> None:
    tokens = 500
    with FlopCounterMode(display=False) as counter:
        for inputs in (384, 192):
            x, lacking = torch.zeros(tokens, inputs), torch.zeros(tokens, 192)
            x.T @ x, x.T @ lacking
    both = 2 * counter.get_total_flops()  # all prompts, and the halves together
    assert (solving(shape, tokens) - solving(shape, 0)) / 6 == pytest.approx(both)
