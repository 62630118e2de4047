"""Terms of a peak on a shape written down by hand. Peaks of processes: scripts/bench.py memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import core_model_loading

from duat_cli.analysis.plan.memory import BATCHES, IMPULSE_STATES, KERNEL_SQUARES, MOST_PREPARED, peak
from duat_cli.analysis.plan.shape import LOADERS, Shape, shape_of
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import (
    LIBRARIES,
    LIBRARIES_GPU,
    PREPARED,
    PROVED,
    READERS,
    READERS_SIZE,
    REPLAYS,
    STATES,
    STRUCTURE,
    size_of,
)
from duat_cli.analysis.plan.waves import WAVE_BYTES
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.models.budgets import BATCH_BYTES_GPU, CHANNEL_HEADS, IMPULSES, batched_bytes
from duat_cli.operators import paper
from duat_cli.results.plan import Planned, Residence

MIB = 1 << 20


def shape(
    dtype: str = "float32", layers: int = 4, embedding: int = 64 * MIB, width: int = 1024, experts: int = 0
) -> Shape:
    """Blocks of 6 Mi elements stored in two bytes, an embedding of `embedding` elements, 2 heads of width 512; in each
    block as many experts of 3 Mi elements, stored one by one."""

    def entry(*sides: int) -> TensorEntry:
        elements = sides[0] * sides[1]
        return TensorEntry(sides, "BF16", "model.safetensors", 2 * elements, 0)

    blocks = {f"layers.{k}.{n}": entry(1024, 3072) for k in range(layers) for n in ("up", "down")}
    for k, expert, n in itertools.product(range(layers), range(experts), ("up", "gate", "down")):
        blocks[f"layers.{k}.experts.{expert}.{n}"] = entry(1024, 1024)
    tensors = {"embed": entry(embedding // 1024, 1024), **blocks}
    config = {"hidden_size": width, "num_attention_heads": 2, "head_dim": 512, "num_key_value_heads": 1}
    total = sum(tensor.bytes for tensor in tensors.values())
    return shape_of(CheckpointFiles(Path(), config, (), tensors, (), total, {}), dtype)


def terms(of: Shape, command: Planned, tokens: list[int], weights: Residence, *, gpu: bool = False) -> dict[str, int]:
    return {term.what: term.bytes for term in peak(of, Task(command, tuple(tokens), gpu=gpu), weights) if term.bytes}


def total(of: Shape, command: Planned, tokens: list[int], weights: Residence) -> int:
    return sum(terms(of, command, tokens, weights).values())


def test_resident_weights_are_all_there() -> None:
    found = terms(shape(), "verify", [16], "resident")
    assert found["weights"] == 4 * (64 + 4 * 6) * MIB
    assert found["libraries"] == LIBRARIES
    assert found["the largest tensor, as stored"] == 128 * MIB  # while the embedding is read


def test_streamed_a_large_embedding_stands_beside_its_stored_bytes() -> None:
    found = terms(shape(), "check", [16], "streamed")
    assert (found["embed"], found["stored bytes beside it"]) == (256 * MIB, 128 * MIB)
    found = terms(shape("bfloat16"), "check", [16], "streamed")
    assert (found["embed"], found["stored bytes beside it"]) == (128 * MIB, 12 * MIB)  # the next block, no cast


def test_streamed_what_is_neither_run_nor_drawn_is_looked_through_in_pieces() -> None:
    for of, command in ((shape(), "verify"), (shape(width=512), "check")):  # a row is wider than the stream: no head
        found = terms(of, command, [16], "streamed")
        assert "embed" not in found
        assert size_of(peak(of, Task(command, (16,)), "streamed")) < size_of(
            peak(of, Task(command, (16,), reinitialised=True), "streamed")
        )


def test_streamed_a_block_stands_beside_the_next_one() -> None:
    found = terms(shape(embedding=4 * MIB), "verify", [16], "streamed")
    assert (found["one block"], found["the next block, as stored"]) == (24 * MIB, 12 * MIB)
    assert found["weights outside of large layers"] == 16 * MIB
    assert "the next block, as stored" not in terms(shape(embedding=4 * MIB, layers=1), "verify", [16], "streamed")


@pytest.mark.parametrize(("dtype", "whole"), [("float32", 30 + 24 + 60), ("bfloat16", 30 + 30)])
def test_streamed_experts_are_put_together_beside_what_is_stored(dtype: str, whole: int) -> None:
    """15 Mi elements in two bytes each; 6 of them are first layers of experts, which stand there twice, cast, where the
    others are cast too. What is not cast takes less than a block beside the next one."""
    found = terms(shape(dtype, embedding=4 * MIB, experts=3), "verify", [16], "streamed")
    names = "one block", "the next block, as stored", "experts, while they are put together"
    assert sum(found.get(name, 0) for name in names) == whole * MIB


def test_of_a_gpu_neither_imports_nor_the_next_block_take_anything() -> None:
    found = terms(shape(), "check", [16], "streamed", gpu=True)
    assert found["libraries"] == LIBRARIES_GPU
    assert (found["embed"], found["stored bytes beside it"]) == (256 * MIB, 128 * MIB)  # until it is cast there
    found = terms(shape("bfloat16"), "check", [16], "streamed", gpu=True)
    assert found["embed"] == 128 * MIB
    assert "stored bytes beside it" not in found
    found = terms(shape(embedding=4 * MIB), "verify", [16], "streamed", gpu=True)
    assert (found["one block"], found["the next block, as stored"]) == (
        24 * MIB,
        8 * MIB,
    )  # of which one tensor is cast


def test_a_gpu_holds_what_each_thread_casts_there() -> None:
    loaded = "the largest tensors, as stored"
    large = replace(shape(), vocabulary=0)
    assert terms(large, "verify", [1], "resident", gpu=True)[loaded] == (128 + 3 * 6) * MIB  # of four threads
    assert loaded not in terms(shape("bfloat16"), "verify", [1], "resident", gpu=True)
    assert LOADERS >= core_model_loading.GLOBAL_WORKERS


def test_a_gpu_works_on_more_of_h_at_once() -> None:
    few = shape(embedding=MIB)
    assert "statistics of W'" not in terms(few, "inspect", [1024], "resident")  # less than the prompt's own pass
    values, rows = 2 * 1024 * 2 * 1024, 6 * 2 * 1024**2
    assert terms(few, "inspect", [1024], "resident", gpu=True)["statistics of W'"] == 4 * (values + rows)


def test_a_gpu_runs_larger_batches() -> None:
    what, few = "batches of prompts", shape(embedding=MIB)
    assert terms(few, "inspect", [16] * 200, "resident")[what] == BATCHES
    assert terms(few, "inspect", [16] * 200, "resident", gpu=True)[what] == 3 * batched_bytes(16, 1024, 2, 4)
    assert terms(few, "inspect", [900] * 2000, "resident", gpu=True)[what] == BATCH_BYTES_GPU


def test_half_precision_holds_the_values_and_outputs_of_all_blocks_in_float32() -> None:
    wide, half = (
        terms(shape(dtype, embedding=MIB), "inspect", [256], "resident")["values of all blocks, V"]
        for dtype in ("float32", "bfloat16")
    )
    assert half - wide == 4 * 2 * 512 * 1024 * 4  # O of four blocks


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_depth_costs_nothing_but_weights(weights: Residence) -> None:
    shallow, deep = (total(shape(layers=layers), "verify", [4096], weights) for layers in (4, 8))
    values, known = 8 * 2 * MIB, 4 * STRUCTURE  # V of four more blocks, twice
    assert deep - shallow == (4 * 24 * MIB + values + known if weights == "resident" else known)


def test_products_in_half_precision_are_kept_for_every_length_of_prompt() -> None:
    def kept(dtype: str, tokens: list[int], **options: Any) -> int:
        found = peak(shape(dtype), Task("inspect", tuple(tokens), **options), "resident")
        return sum(one.bytes for one in found if one.what == PREPARED)

    assert kept("float32", [5, 9]) == kept("bfloat16", [5, 9], gpu=True) == 0
    assert kept("bfloat16", [5, 5]) == kept("bfloat16", [9]) < kept("bfloat16", [5, 9])
    assert kept("bfloat16", list(range(5, 200))) == kept("float16", list(range(5, 90))) == MOST_PREPARED


def test_long_prompts_cost_their_square() -> None:
    short, long, longer = (total(shape(), "inspect", [n], "resident") for n in (4096, 8192, 16384))
    assert 3.5 < (longer - long) / (long - short) < 4.1


def test_a_kernel_of_many_channels_takes_impulses_then_squares_of_its_heads() -> None:
    small = shape(embedding=4 * MIB)
    few, many = (replace(small, kernels=3, channels=channels, state=16) for channels in (512, 8192))
    impulses, squares = (terms(one, "inspect", [64], "streamed") for one in (few, many))
    once = (STATES - IMPULSE_STATES) * 64 * 512  # values of one prompt
    assert impulses["impulses in the kernel"] == int((IMPULSE_STATES * IMPULSES + once) * 16 * 4)
    assert impulses["H of a kernel, by channel"] * 16 == squares["H of a kernel, by channel"]
    assert squares["statistics of W', by channel"] == KERNEL_SQUARES * 8 * 8192**2
    held = term_of(few, "values of all blocks, V") - term_of(small, "values of all blocks, V")
    assert held == 4 * (512**2 + 3 * 512 * 1024)  # one V, O of three blocks


def test_of_more_channels_than_are_measured_no_statistics_are_planned() -> None:
    refused = replace(shape(embedding=4 * MIB), kernels=3, channels=CHANNEL_HEADS + 1, state=16)
    found = terms(refused, "inspect", [64], "streamed")
    assert set(found) >= {"impulses in the kernel"}
    assert not {"statistics of W', by channel", "H of a kernel, by channel"} & set(found)
    plain = terms(shape(embedding=4 * MIB), "inspect", [64], "streamed")
    assert found["values of the block, V"] == plain["values of the block, V"]


def term_of(of: Shape, what: str) -> int:
    return terms(of, "inspect", [1024], "resident")[what]


def test_prompts_wait_in_front_of_a_block_when_streamed_alone() -> None:
    one, many = ([2048], [2048] * 50)
    assert total(shape(), "verify", one, "resident") == total(shape(), "verify", many, "resident")
    of, what = shape(embedding=4 * MIB), "prompts in front of the block"
    few, rest = (terms(of, "verify", tokens, "streamed")[what] for tokens in (one, many))
    assert few < rest <= WAVE_BYTES


def test_inspect_takes_more_than_verify() -> None:
    for weights in ("resident", "streamed"):
        assert total(shape(embedding=4 * MIB), "inspect", [64], weights) > total(
            shape(embedding=4 * MIB), "verify", [64], weights
        )


def test_matrix_builds_its_matrices_as_far_as_their_sides_allow() -> None:
    H, value, output = torch.ones(2, 3, 3), torch.ones(2, 1024, 512), torch.ones(2, 512, 1024)
    operator, outputs = paper.attention_matrix(H, value, output), paper.attention_output_matrix(output, 3)
    values = paper.attention_value_matrix(H, value)
    product = outputs @ values
    built = [operator, outputs, values, product, product - operator]
    written = terms(shape(), "matrix", [3], "resident")["the paper's matrices, entry by entry"]
    assert written == sum(matrix.nbytes for matrix in built)
    assert terms(shape(), "matrix", [3], "streamed")["the paper's matrices, entry by entry"] == written
    left = paper.linear_matrix_left(
        output.flatten(0, 1), 4
    )  # of longer prompts it alone: four columns give a side of 4096
    assert 4 * left.numel() == left.nbytes == 64 * MIB
    moment = peak(shape(embedding=1 << 20, layers=1), Task("matrix", (5,)), "resident")
    assert {term.what: term.bytes for term in moment}["the paper's matrices, entry by entry"] == left.nbytes
    assert "the paper's matrices, entry by entry" not in terms(shape(), "verify", [3], "resident")


def test_a_probe_as_large_as_a_picture_counts_while_a_block_is_proved() -> None:
    """Replays are of all its tokens; of texts discovery reads a few. On a GPU no library reads pictures."""
    small = replace(shape(), width=384, heads=12)

    def found(weights: Residence, probe: int, *, gpu: bool = False) -> dict[str, int]:
        task = Task("verify", (577,), probe=probe, gpu=gpu)
        return {term.what: term.bytes for term in peak(small, task, weights) if term.bytes}

    proof = 4 * (12 * 577**2 + PROVED * REPLAYS * 577 * 384)
    for weights in ("resident", "streamed"):
        with_probe, without = found(weights, 577), found(weights, 0)
        assert with_probe["the proof of one block"] == proof
        assert with_probe[READERS] == READERS_SIZE
        assert "the proof of one block" not in without
        assert READERS not in without
        assert sum(with_probe.values()) > sum(without.values())
    assert READERS not in found("resident", 577, gpu=True)
