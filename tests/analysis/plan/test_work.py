"""Reads against the bytes that a streamed run reads, operations against torch's own count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import prompt_of
from paging import in_parts, pager_of, saved, whole
from torch.utils.flop_counter import FlopCounterMode

from duat_cli.analysis.inspect.run import InspectOptions, inspect, verify
from duat_cli.analysis.matrix.run import matrix
from duat_cli.analysis.plan.shape import shape_of
from duat_cli.analysis.plan.waves import waves
from duat_cli.analysis.plan.work import CHECKED, operations, weight_reads
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.model.load import LoadedModel
from duat_cli.results.plan import Planned


def quiet(*_: object) -> None:
    pass


def run(command: Planned, loaded: LoadedModel) -> None:
    prompt = prompt_of(torch.arange(40, 49)[None])
    if command == "inspect":
        inspect(loaded, [prompt], InspectOptions(cache=False), quiet)
    elif command == "verify":
        verify(loaded, [prompt], quiet)
    else:
        matrix(loaded, prompt, 0, str, quiet)


@pytest.mark.parametrize("command", ["inspect", "verify", "matrix"])
def test_weight_reads(command: Planned, tmp_path: Path) -> None:
    files = inspect_folder(saved("llama", tmp_path))
    with in_parts(tmp_path, kept=1 << 30) as loaded:
        run(command, loaded)
        read = pager_of(loaded).bytes_read
    shape = shape_of(files, "float32")
    assert weight_reads(shape, command, [9], "streamed") == pytest.approx(read / files.total_bytes)
    assert weight_reads(shape, command, [9], "resident") == 1


def test_every_wave_reads_the_blocks_once(tmp_path: Path) -> None:
    shape = shape_of(inspect_folder(saved("llama", tmp_path)), "float32")
    few, many = (weight_reads(shape, "inspect", [4096] * count, "streamed") for count in (1, 9))
    share = sum(block.stored for block in shape.parts.blocks) / inspect_folder(tmp_path).total_bytes
    assert many - few == pytest.approx(share * (len(waves([4096] * 9, shape.width, shape.element)) - 1))
    assert many > few


def test_operations_of_one_pass(tmp_path: Path) -> None:
    shape = shape_of(inspect_folder(saved("llama", tmp_path)), "float32")
    model, ids = whole(tmp_path).model, torch.arange(40, 60)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.base_model(ids)
    counted = counter.get_total_flops()
    passes = operations(shape, "verify", [20]) - operations(shape, "verify", [])  # each prompt runs twice
    assert passes / 2 == pytest.approx(counted, rel=1e-3)
    assert operations(shape, "inspect", []) == operations(shape, "verify", [CHECKED]) / 2


def test_the_count_is_of_a_model_with_matrices(tmp_path: Path) -> None:
    shape = shape_of(inspect_folder(saved("llama", tmp_path)), "float32")
    assert shape.products == sum(p.numel() for n, p in whole(tmp_path).model.named_parameters() if "proj" in n)
