"""Which way is taken at which limit, and what is said where none fits."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch

from duat_cli.analysis.plan import run as module
from duat_cli.analysis.plan.memory import BATCHES
from duat_cli.analysis.plan.run import Plan, on_device, plan, way_of
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.models.budgets import ABLATION_BYTES
from duat_cli.results.plan import Residence, Way


def demo(memory: int | None = None, *, reinitialised: bool = False) -> Plan:
    return plan(inspect_folder(demo_path()), Task("inspect", (32, 8), reinitialised=reinitialised), "float32", memory)


def peaks() -> dict[Residence, int]:
    return {way.weights: way.peak_memory_bytes for way in demo(1 << 40).ways}


def test_the_first_way_that_fits_is_taken() -> None:
    resident, streamed = peaks()["resident"], peaks()["streamed"]
    assert streamed < resident
    for limit, expected in ((resident, "resident"), (resident - 1, "streamed"), (streamed, "streamed")):
        assert way_of(demo(limit)).weights == expected


def test_what_cannot_be_done_is_said_in_one_line() -> None:
    with pytest.raises(CheckpointError) as seen:
        way_of(demo(peaks()["streamed"] - 1))
    message = str(seen.value)
    assert "\n" not in message
    for word in ("streamed, it needs 43", "libraries 426 MiB", "model.layers.0, takes 1 MiB as float32", "has 43"):
        assert word in message


def test_what_is_named_is_enough() -> None:
    needed = re.search(r"it needs (\d+) MiB", str(demo(peaks()["streamed"] - 1).reason))
    assert needed is not None
    assert demo(int(needed[1]) << 20).chosen is not None
    assert demo((int(needed[1]) - 1) << 20).chosen is None


def test_without_an_option_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limit", lambda: 7)
    assert demo().limit == 7
    assert demo().chosen is None


def test_a_second_model_is_planned_where_it_fits() -> None:
    alone, weights = peaks()["resident"], demo().shape.weights
    resident = demo(1 << 40, reinitialised=True).ways[0]
    assert resident.peak_memory_bytes == alone + weights
    assert demo(alone + weights, reinitialised=True).ways[0].peak_memory_bytes == alone  # no room to run it


def test_terms_add_up_to_the_peak_and_parts_to_the_weights() -> None:
    made = demo(reinitialised=True)
    for way in made.ways:
        assert sum(term.bytes for term in way.terms) == way.peak_memory_bytes
    weights = made.weights()
    assert weights.stored_bytes == made.files.total_bytes
    assert weights.largest_block is not None
    assert weights.bytes == weights.frame_bytes + weights.blocks * weights.largest_block.bytes


def test_the_largest_block_is_named() -> None:
    files = inspect_folder(demo_path())
    name, entry = next((n, e) for n, e in files.tensors.items() if ".layers.4." in n and len(e.shape) == 2)
    larger = dataclasses.replace(entry, shape=(2 * entry.shape[0], entry.shape[1]), bytes=2 * entry.bytes)
    made = plan(
        dataclasses.replace(files, tensors={**files.tensors, name: larger}), Task("verify", (8,)), "float32", None
    )
    block = made.weights().largest_block
    assert block is not None
    assert block.name == "model.layers.4"
    assert len(list(itertools.takewhile(lambda part: part.name != block.name, made.shape.parts.blocks))) == 4


def test_processes_share_the_prompts_as_far_as_there_are_prompts_and_room() -> None:
    files = inspect_folder(demo_path())

    def resident(processes: int, memory: int, tokens: tuple[int, ...] = (32,) * 6) -> Way:
        task = Task("prune-bound", tokens, pruning=PruneOptions(), processes=processes)
        return plan(files, task, "float32", memory).ways[0]

    alone, two = resident(1, 1 << 40), resident(2, 1 << 40)
    assert alone.processes == 1
    for processes, expected in ((2, 2), (3, 3), (64, 6)):
        way = resident(processes, 1 << 40)
        assert way.processes == expected
        assert sum(term.bytes for term in way.terms) == way.peak_memory_bytes
        more = way.terms[-1]
        assert "processes that share" in more.what
        assert more.bytes * 2 == two.terms[-1].bytes * expected
        assert way.peak_memory_bytes > alone.peak_memory_bytes
    assert resident(2, two.peak_memory_bytes).processes == 2
    assert resident(2, two.peak_memory_bytes - 1).processes == 1
    assert resident(2, 1 << 20).processes == 1


def test_prompts_of_inspect_are_shared_behind_the_first() -> None:
    files = inspect_folder(demo_path())

    def resident(prompts: int, memory: int | None = 1 << 40, **more: Any) -> Way:
        task = Task("inspect", (32,) * prompts, **{"processes": 2, **more})
        return plan(files, task, "float32", memory).ways[0]

    assert [resident(prompts).processes for prompts in (1, 2, 3, 9)] == [1, 1, 2, 2]
    single = Task("attribute", (32,) * 3, processes=2, every_position=True)
    assert plan(files, single, "float32", 1 << 40).ways[0].processes == 2
    assert resident(9, processes=3).processes == 3
    two, alone = resident(9), resident(9, processes=1)
    assert sum(term.bytes for term in two.terms) == two.peak_memory_bytes > alone.peak_memory_bytes
    beside, both = resident(9, reinitialised=True), {term.what: term.bytes for term in two.terms}
    assert beside.peak_memory_bytes == two.peak_memory_bytes + both["weights"]
    for way, more in ((two, False), (beside, True)):
        assert resident(9, way.peak_memory_bytes + (1 << 24), reinitialised=more).processes == 2
        assert resident(9, way.peak_memory_bytes - (1 << 20), reinitialised=more).processes == 1
    checks = plan(files, Task("check", (32,) * 9, processes=2), "float32", 1 << 40).ways[0]
    assert (checks.processes, checks.terms[-1].bytes) == (2, two.terms[-1].bytes)
    pruned = Task("check", (32,) * 9, processes=2, pruning=PruneOptions(measure=0))
    assert plan(files, pruned, "float32", 1 << 40).ways[0].peak_memory_bytes > checks.peak_memory_bytes
    many = resident(200)
    assert many.terms[-1].bytes - two.terms[-1].bytes == 2 * BATCHES


@pytest.mark.parametrize(
    ("command", "sees", "expected"), [("inspect", True, 1), ("inspect", False, 4), ("prune-bound", True, 4)]
)
def test_none_is_forked_behind_gradients_where_there_is_an_accelerator(
    command: Any, sees: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: sees)
    task, memory = on_device(torch.device("cpu"), Task(command, processes=4), 1 << 30)
    assert (task.processes, memory) == (expected, 1 << 30)


def test_what_is_left_takes_more_passes_side_by_side_and_fewer_reads() -> None:
    files = inspect_folder(demo_path())
    task = Task("prune-bound", (400,) * 160, (400,) * 160, pruning=PruneOptions(kinds=("neuron", "head", "block")))
    bare = plan(files, task, "float32", 1 << 50, roomy=False).ways[1]
    room, all_of = 2 << 30, plan(files, task, "float32", 1 << 50).ways[1]
    some = plan(files, task, "float32", bare.peak_memory_bytes + room).ways[1]
    none = plan(files, task, "float32", bare.peak_memory_bytes - 1).ways[1]
    assert none.waiting_bytes == bare.waiting_bytes == ABLATION_BYTES
    assert some.waiting_bytes == ABLATION_BYTES + room // 2 < all_of.waiting_bytes
    assert bare.weight_reads == none.weight_reads > some.weight_reads > all_of.weight_reads
    assert some.fits
    assert some.peak_memory_bytes <= bare.peak_memory_bytes + room // 2
    assert plan(files, Task("inspect", (400,) * 40), "float32", 1 << 50).ways[1].waiting_bytes == 0


def test_large_layers_are_left_to_threads_where_prompts_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_BLOCK", 0)
    task = Task("prune-bound", (32, 8), pruning=PruneOptions(), processes=4)
    files = inspect_folder(demo_path())
    assert plan(files, task, "float32", 1 << 40).ways[0].processes == 1
    assert plan(files, dataclasses.replace(task, processes=2), "float32", 1 << 40).ways[0].processes == 2
