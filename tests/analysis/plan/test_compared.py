"""Work of comparing weights: by what grows with which side of a matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duat_cli.analysis.lora.run import task_of
from duat_cli.analysis.opening import Found
from duat_cli.analysis.plan.compared import comparing_operations
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import Task
from duat_cli.loading.adapter.source import find_tuned
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path, resolve


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
