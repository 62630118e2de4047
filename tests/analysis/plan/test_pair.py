"""Two models side by side, and weights looked at tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duat_cli.analysis.lora.run import task_of
from duat_cli.analysis.opening import Found
from duat_cli.analysis.plan import pair
from duat_cli.analysis.plan.memory import peak, shared
from duat_cli.analysis.plan.pair import two_models
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import FORKED, PROBED, PROOF, PROVED, REPLAYS, STRUCTURE, size_of, through_block
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.loading.adapter.keys import read_keys
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.adapter.plan import plans
from duat_cli.loading.adapter.source import find_tuned
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path, resolve
from duat_cli.operators import input_change
from duat_cli.results.plan import Residence

MIB = 1 << 20


@pytest.fixture
def found() -> Found:
    return Found(resolve(None), inspect_folder(demo_path()))


@pytest.fixture
def shape(found: Found) -> Shape:
    return shape_of(found.files, "float32")


def test_an_adapter_stands_beside_the_base_with_what_it_changes(found: Found, shape: Shape) -> None:
    task = task_of(found, find_tuned(None), runs=True)
    adapter = open_adapter(demo_adapter_path(), "demo")
    known = plans(adapter, read_keys(adapter), BaseWeights(found.place, found.files))
    places = [plan.place for plan in known if isinstance(plan, ParameterPlan)]
    sizes = [found.files.tensors[place.tensor].elements for place in places if place is not None]
    changed = sum(tensor.elements for tensor in task.changed)
    assert changed == sum(sizes) > 0
    terms = {term.what: term.bytes for term in peak(shape, replace(task, tokens=(32,)), "resident")}
    assert terms["weights of the tuned model"] == 4 * changed < terms["weights"]


def test_a_tuned_checkpoint_is_a_second_model(found: Found, shape: Shape) -> None:
    task = replace(task_of(found, find_tuned(str(demo_path())), runs=True), tokens=(32,))
    assert task.tuned is not None
    alone = size_of(peak(shape, Task("verify", (32,)), "resident"))
    both = size_of(peak(shape, task, "resident", shape))
    assert shape.weights < both - alone < shape.weights + 40 * MIB
    assert size_of(peak(shape, task, "streamed", shape)) < both


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_eq_18_takes_three_float64_copies_of_a_layer_beside_both_models(
    found: Found, shape: Shape, weights: Residence
) -> None:
    task = replace(task_of(found, find_tuned(None), runs=True), tokens=(1,))
    sizes = [tensor.elements for name, tensor in found.files.tensors.items() if ".layers." in name]
    moments = two_models(shape, task, weights, None)
    [tested] = [one for moment in moments for one in moment if "Eq. 18" in one.what]
    assert tested.bytes == 3 * 8 * max(sizes)


def test_a_probe_as_large_as_a_picture_is_written_down_or_proved_on_in_both_models(found: Found, shape: Shape) -> None:
    """In float32, of ViTs of 12 blocks: width 384 and 577 tokens took 1021 MiB resident and 1042 streamed."""
    task = replace(task_of(found, find_tuned(None), runs=True), tokens=(577,), probe=577)
    small = replace(shape, width=384, heads=6)
    resident, streamed = (
        [{one.what: one.bytes for one in moment} for moment in two_models(small, task, weights, None)]
        for weights in ("resident", "streamed")
    )
    proof = 4 * (6 * 577**2 + PROVED * REPLAYS * 577 * 384)
    written = len(small.parts.blocks) * through_block(small, 577).bytes
    assert any(moment.get(PROOF) == proof and moment.get(PROBED) == written for moment in resident)
    assert any(moment.get(PROOF) == 5 * proof for moment in streamed)
    texts = [one for way in ("resident", "streamed") for one in two_models(small, replace(task, probe=0), way, None)]
    assert not any(one.bytes for moment in texts for one in moment if one.what in (PROOF, PROBED))


def test_processes_that_share_prompts_keep_a_prompt_in_the_base_each(found: Found, shape: Shape) -> None:
    task = task_of(found, find_tuned(None), runs=True)

    def own(*tokens: int, processes: int = 2) -> int:
        [*every, more] = shared(shape, replace(task, tokens=tokens), processes)
        assert {term.what for term in every} >= {"weights of the tuned model", "the tuned model's structure"}
        return more.bytes

    assert own(64, 64, 64) == own(64, 64) == 2 * own(64, processes=1)
    assert own(64, 32, 96) == own(96, 64) > own(64, 64)
    running = {term.what: term.bytes for term in peak(shape, replace(task, tokens=(2000,)), "resident")}
    per_block = 2 * len(shape.parts.blocks) * STRUCTURE
    kept = running["one prompt in all blocks of the base"] + running["one prompt through one block"]
    assert own(2000, processes=1) == FORKED + per_block + kept


def test_without_prompts_no_model_is_there(found: Found, shape: Shape) -> None:
    for tuned in (None, str(demo_path())):
        task = task_of(found, find_tuned(tuned), runs=False)
        terms = {term.what: term.bytes for term in peak(shape, task, "streamed", shape if tuned else None)}
        assert "weights" not in terms
        assert terms["a tensor, as stored"] == shape.largest_tensor * (2 if tuned else 1)


def test_a_check_of_weights_alone_takes_no_torch(shape: Shape) -> None:
    assert size_of(peak(shape, Task("check", runs=False), "streamed")) < 64 * MIB


def test_two_prompts_are_compared_in_float64_piece_by_piece(shape: Shape) -> None:
    assert pair.ELEMENTS == input_change.ELEMENTS
    task = Task("compare", (500, 500))
    terms = {term.what: term.bytes for term in peak(shape, task, "resident")}
    scores = shape.heads * 500**2
    assert (
        terms["two prompts in one block"] == 12 * 8 * min(1 << 20, scores) + 3 * 4 * scores + 8 * 4 * 500 * shape.width
    )
    patched = {term.what for term in peak(shape, replace(task, patch=True), "resident")}
    assert "two prompts in one block" not in patched  # what is patched in stands in memory instead
