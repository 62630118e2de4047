"""Reads against the bytes that a streamed run reads, operations against torch's own count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import prompt_of, single_model, two_deep
from paging import in_parts, pager_of, two_saved, whole
from torch.utils.flop_counter import FlopCounterMode

from duat_cli.analysis.compare.request import Texts
from duat_cli.analysis.compare.run import CompareOptions, compare
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.analysis.lora.run import task_of
from duat_cli.analysis.matrix.run import matrix
from duat_cli.analysis.opening import Found
from duat_cli.analysis.plan import work
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.plan.terms import CHECKED
from duat_cli.analysis.plan.waves import prompt_waves
from duat_cli.analysis.plan.work import (
    DRAWN,
    KERNEL_SPECTRUM,
    KERNEL_STEP,
    comparing_operations,
    operations,
    statistics_operations,
    untrained_operations,
    weight_reads,
)
from duat_cli.analysis.prune.run import prune_bound
from duat_cli.kinds import Kind, MetricName, Patched
from duat_cli.loading.adapter.source import find_tuned
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path, resolve
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.texts import PromptText
from duat_cli.loading.words import Words
from duat_cli.operators import bounds
from duat_cli.operators.kronecker import HeadFactors, gram
from duat_cli.results.plan import Planned, Residence


def quiet(*_: object) -> None:
    pass


def run(command: Planned, loaded: LoadedModel, patch: Patched | None = None) -> None:
    prompt = prompt_of(torch.arange(40, 49)[None])
    if command == "inspect":
        inspect(loaded, [prompt], InspectOptions(cache=False), quiet)
    elif command == "verify":
        verify(loaded, [prompt], quiet)
    elif command == "compare":
        texts = Texts([PromptText(name, name, 1) for name in "ab"], 2, [(0, 1)])
        other = prompt_of(torch.arange(42, 51)[None])
        compare(loaded, texts, [prompt, other], CompareOptions(cache=False, patch=patch), Words(None), quiet)
    else:
        matrix(loaded, prompt, 0, str, quiet)


@pytest.mark.parametrize("patch", [None, "blocks", "heads"])
def test_weight_reads_of_comparing(patch: Patched | None, tmp_path: Path) -> None:
    files = inspect_folder(two_saved("llama", tmp_path))
    with in_parts(tmp_path, kept=1 << 30) as loaded:
        run("compare", loaded, patch)
        read = pager_of(loaded).bytes_read
    task = Task("compare", (9, 9), patch=patch is not None)
    assert weight_reads(shape_of(files, "float32"), task, "streamed") == pytest.approx(read / files.total_bytes)


def test_without_a_head_nothing_more_is_read_for_comparing(tmp_path: Path) -> None:
    two_deep(single_model("llama")).model.save_pretrained(tmp_path)
    files = inspect_folder(tmp_path)
    with in_parts(tmp_path, kept=1 << 30) as loaded:
        run("compare", loaded)
        read = pager_of(loaded).bytes_read
    found = weight_reads(shape_of(files, "float32"), Task("compare", (9, 9)), "streamed")
    assert found == pytest.approx(read / files.total_bytes)


@pytest.mark.parametrize("command", ["inspect", "verify", "matrix"])
def test_weight_reads(command: Planned, tmp_path: Path) -> None:
    files = inspect_folder(two_saved("llama", tmp_path))
    with in_parts(tmp_path, kept=1 << 30) as loaded:
        run(command, loaded)
        read = pager_of(loaded).bytes_read
    shape = shape_of(files, "float32")
    assert weight_reads(shape, Task(command, (9,)), "streamed") == pytest.approx(read / files.total_bytes)
    assert weight_reads(shape, Task(command, (9,)), "resident") == 1


@pytest.mark.parametrize("metric", ["kl", "hidden"])
@pytest.mark.parametrize("tried", [8, 0])
def test_weight_reads_of_pruning(tried: int, metric: MetricName, tmp_path: Path) -> None:
    """Three sweeps, one for sets of FFNs, each of which is measured first, and one for a trial; none for Eq. 16."""
    files = inspect_folder(two_saved("llama", tmp_path))
    options = PruneOptions(kinds=("head", "ffn"), metric=metric, probes=3, measure=2, budget=1e9, exceed=0.5)
    prompts = [prompt_of(torch.arange(first, 9 + first)[None]) for first in range(40, 42)]
    held_out = [prompt_of(torch.arange(first, 9 + first)[None]) for first in range(50, 50 + tried)]
    with in_parts(tmp_path, kept=1 << 30) as loaded:
        prune_bound(loaded, prompts, held_out, options, quiet)
        read = pager_of(loaded).bytes_read
    task = Task("prune-bound", (9, 9), (9,) * tried, pruning=options)
    shape = shape_of(files, "float32")
    assert weight_reads(shape, task, "streamed") == pytest.approx(read / files.total_bytes, rel=0.02)
    assert weight_reads(shape, task, "resident") == 1


def test_gram_matrices_are_counted_as_torch_counts_them() -> None:
    shape = shape_of(inspect_folder(demo_path()), "float32")
    factors = HeadFactors(
        torch.zeros(shape.kv_heads, shape.width, shape.head_width),
        torch.zeros(shape.heads, shape.head_width, shape.width),
    )
    with FlopCounterMode(display=False) as counted:
        gram(factors)
    grams = counted.get_total_flops() * len(shape.parts.blocks)
    once, twice = (statistics_operations(shape, Task("inspect", (9,) * n)) for n in (1, 2))
    assert once - (twice - once) == pytest.approx(grams)


def test_a_reinitialised_model_is_drawn_and_run_once_a_count_of_tokens() -> None:
    shape = shape_of(inspect_folder(demo_path()), "float32")

    def of(weights: Residence, *tokens: int) -> float:
        return untrained_operations(shape, Task("inspect", tokens, reinitialised=True), weights)

    assert untrained_operations(shape, Task("inspect", (9,)), "resident") == 0
    assert of("resident", 9, 9) == of("resident", 9) < of("resident", 9, 10)
    assert of("streamed", 9) - of("resident", 9) == DRAWN * shape.weights / shape.element


def test_more_probes_and_terms_are_more_operations() -> None:
    shape = shape_of(inspect_folder(demo_path()), "float32")

    def of(**options: Any) -> float:
        return operations(shape, Task("prune-bound", (64,), pruning=PruneOptions(**options)))

    once = (operations(shape, Task("verify", (64,))) - operations(shape, Task("verify"))) / 2
    logits = 2 * 192 * 2048 * 64
    assert of(probes=42) - of(probes=32) == pytest.approx(10 * (once + logits))
    assert of(kinds=("neuron",), measure=9) - of(kinds=("neuron",), measure=5) > 2 * once + 4 * logits
    assert of(metric="hidden") < of(metric="kl")


def test_sets_of_other_criteria_are_passes_of_the_held_out_prompts() -> None:
    shape = shape_of(inspect_folder(demo_path()), "float32")

    def of(*, criteria: bool, **options: Any) -> float:
        pruning = PruneOptions(criteria=criteria, **options)
        return operations(shape, Task("prune-bound", (64,), (32,) * 3, pruning=pruning))

    once = (operations(shape, Task("verify", (32,))) - operations(shape, Task("verify"))) / 2
    each, counts = 3 * (once + 2 * 192 * 2048 * 32), {"neuron": 28, "ffn": 20, "block": 18}
    for kind, sets in counts.items():
        more = of(criteria=True, kinds=(kind,)) - of(criteria=False, kinds=(kind,))
        assert more == pytest.approx(sets * each)
    uniform = [of(criteria=on, kinds=("neuron",), uniform=True) for on in (True, False)]
    assert uniform[0] - uniform[1] == pytest.approx(20 * each)


def test_bounds_of_whole_parts_cost_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neurons and heads none is taken, nor of a model too wide for them."""
    shape = shape_of(inspect_folder(demo_path()), "float32")

    def of(*kinds: Kind) -> float:
        return work.certified_operations(shape, PruneOptions(kinds=kinds))

    assert of("neuron", "head") < of("attention") < of("ffn") < of("attention", "ffn") == of("block")
    monkeypatch.setattr(work, "SPECTRAL_SIDE", shape.width - 1)
    assert of("block") == of("neuron")


def test_widths_that_are_too_large_for_singular_values_are_those_of_the_bounds() -> None:
    assert work.SPECTRAL_SIDE == bounds.SPECTRAL_SIDE


def test_kernels_of_channels_cost_impulses_and_pairs_of_heads() -> None:
    shape = shape_of(inspect_folder(demo_path()), "float32")
    wide = replace(shape, kernels=3, channels=512, state=16)

    def added(task: Task) -> float:
        more, less = (
            statistics_operations(one, task) + untrained_operations(one, task, "resident") for one in (wide, shape)
        )
        return more - less

    one = added(Task("inspect", (30,)))
    assert one == pytest.approx(3 * (900 * (KERNEL_STEP * 512 * 16 + 6 * 512**2) + KERNEL_SPECTRUM * 512**3))
    assert added(Task("inspect", (30, 30))) == pytest.approx(2 * one)
    assert added(Task("inspect", (30, 30), reinitialised=True)) == pytest.approx(3 * one)
    assert added(Task("verify", (30,))) == 0


def test_every_wave_reads_the_blocks_once(tmp_path: Path) -> None:
    shape = shape_of(inspect_folder(two_saved("llama", tmp_path)), "float32")
    few, many = (weight_reads(shape, Task("inspect", (4096,) * count), "streamed") for count in (1, 9))
    share = sum(block.stored for block in shape.parts.blocks) / inspect_folder(tmp_path).total_bytes
    assert many - few == pytest.approx(share * (len(prompt_waves([4096] * 9, shape.width, shape.element)) - 1))
    assert many > few


def test_operations_of_one_pass(tmp_path: Path) -> None:
    shape = shape_of(inspect_folder(two_saved("llama", tmp_path)), "float32")
    model, ids = whole(tmp_path).model, torch.arange(40, 60)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.base_model(ids)
    counted = counter.get_total_flops()
    passes = operations(shape, Task("verify", (20,))) - operations(shape, Task("verify"))  # each prompt runs twice
    assert passes / 2 == pytest.approx(counted, rel=1e-3)
    assert operations(shape, Task("inspect")) == operations(shape, Task("verify", (CHECKED,))) / 2


def test_the_count_is_of_a_model_with_matrices(tmp_path: Path) -> None:
    shape = shape_of(inspect_folder(two_saved("llama", tmp_path)), "float32")
    assert shape.products == sum(p.numel() for n, p in whole(tmp_path).model.named_parameters() if "proj" in n)


# -- lora-diff: by what grows with which side of a matrix ----------------------------------------------------


def changing(*sides: int) -> Task:
    return Task("lora-diff", changed=(TensorEntry(sides, "F32", "model.safetensors", 0, 0),))


@pytest.fixture(scope="module")
def found() -> Found:
    return Found(resolve(None), inspect_folder(demo_path()))


@pytest.fixture(scope="module")
def shape(found: Found) -> Shape:
    return shape_of(found.files, "float32")


def test_a_tuned_checkpoint_takes_more_than_an_adapter_of_it(found: Found, shape: Shape) -> None:
    adapter = task_of(found, find_tuned(None), runs=False)
    tuned = task_of(found, find_tuned(str(demo_path())), runs=False)
    assert 0 < comparing_operations(shape, adapter) < comparing_operations(shape, tuned)
    assert comparing_operations(shape, Task("inspect", (9,))) == 0


def test_exact_directions_grow_with_the_square_of_the_shorter_side(shape: Shape) -> None:
    work = [comparing_operations(shape, changing(*sides)) for sides in ((512, 128), (1024, 128), (256, 512), (64,))]
    assert [found / work[0] for found in work] == [1, 2, 4, 0]
    assert comparing_operations(shape, changing(8, 512, 128)) == 8 * work[0]  # experts in a stack


def test_a_larger_matrix_takes_less_than_its_directions(shape: Shape) -> None:
    large = changing(4096, 4096)
    without, asked = (comparing_operations(shape, replace(large, directions=wanted)) for wanted in (False, True))
    assert 0 < without < comparing_operations(shape, changing(4096, 1024)) < asked
