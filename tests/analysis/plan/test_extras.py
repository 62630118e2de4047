"""Memory of what `inspect` computes on request. Peaks of processes were compared on a llama shape of 12 blocks."""

from __future__ import annotations

from typing import get_args

import pytest

from duat_cli.analysis.plan.extras import KEPT_SOURCES, LANCZOS, PAIRS, SOURCES, statistics
from duat_cli.analysis.plan.memory import peak
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import REPLAYED, size_of
from duat_cli.analysis.plan.work import statistics_operations
from duat_cli.kinds import Extra
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.models.budgets import SOURCE_ELEMENTS
from duat_cli.results.plan import Residence

TOKENS = 4096


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(inspect_folder(demo_path()), "float32")


def asked(*names: Extra, tokens: tuple[int, ...] = (TOKENS,)) -> Task:
    return Task("inspect", tokens, extras=frozenset(names))


def named(shape: Shape, task: Task, *, streamed: bool = False) -> dict[str, int]:
    return {one.what: one.bytes for one in peak(shape, task, "streamed" if streamed else "resident")}


def test_source_tokens_take_the_square_of_the_prompt(shape: Shape) -> None:
    found, cube = named(shape, asked("end_to_end")), 4 * TOKENS**2 * shape.width
    assert found["paths of source tokens"] == KEPT_SOURCES * cube
    assert found["replays of terms and source tokens"] == (SOURCES - KEPT_SOURCES) * cube
    few = named(shape, asked("end_to_end", tokens=(300,)))["replays of terms and source tokens"]
    assert few == 4 * ((SOURCES - 1 - KEPT_SOURCES) * 300**2 * shape.width + REPLAYED * SOURCE_ELEMENTS)


def test_terms_take_a_replay_for_each_block(shape: Shape) -> None:
    found, vector, blocks = named(shape, asked("terms")), 4 * TOKENS * shape.width, len(shape.parts.blocks)
    assert found["UAT terms, one by one"] == blocks * vector
    assert found["replays of terms and source tokens"] == blocks * (REPLAYED - 1) * vector


def test_spectra_take_two_bases_and_routing_a_square_for_each_token_and_head(shape: Shape) -> None:
    assert statistics(shape, asked("spectrum"), TOKENS).bytes == 8 * LANCZOS * TOKENS * shape.width
    turned = (shape.heads + shape.kv_heads) * TOKENS * shape.head_width**2 * 4
    assert statistics(shape, asked("routing"), TOKENS).bytes == turned + 8 * PAIRS * TOKENS**2


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("name", get_args(Extra))
def test_each_raises_the_peak_in_either_way(name: Extra, weights: Residence, shape: Shape) -> None:
    plain, more = (size_of(peak(shape, task, weights)) for task in (asked(), asked(name)))
    assert more > plain


def test_read_block_by_block_every_prompt_of_a_wave_keeps_its_own(shape: Shape) -> None:
    one, three = (named(shape, asked("end_to_end", tokens=(100,) * n), streamed=True) for n in (1, 3))
    plain = named(shape, asked(tokens=(100,) * 3), streamed=True)
    states = "prompts in front of the block"
    assert three[states] - plain[states] == 2 * one["paths of source tokens"]


def test_source_tokens_take_two_passes_each_and_terms_half_a_pass_for_each_block(shape: Shape) -> None:
    plain, terms, sources = (
        statistics_operations(shape, asked(*names, tokens=(100,))) for names in ((), ("terms",), ("end_to_end",))
    )
    assert (sources - plain) * len(shape.parts.blocks) == pytest.approx(4 * 100 * (terms - plain))
