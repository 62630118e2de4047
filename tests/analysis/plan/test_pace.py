"""Seconds from operations and bytes, at rates that are given; that rates are measured at all."""

from __future__ import annotations

import pytest

from duat_cli.analysis.plan.pace import DISCOVERY, LONG, ROWS, SHARE, START, Pace, rows_of
from duat_cli.analysis.plan.run import Plan, plan
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.plan.work import operations, statistics_operations
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path


def made(task: Task) -> Plan:
    return plan(inspect_folder(demo_path()), task, "float32", 1 << 40)


def test_reading_and_computing_take_turns_or_go_together() -> None:
    found = made(Task("inspect", (32,)))
    resident, streamed = found.ways
    stored = found.files.total_bytes
    computing = (operations(found.shape, found.task) + statistics_operations(found.shape, found.task)) / SHARE
    start = START + 6 * DISCOVERY
    for rate in (0.01, 1e3):
        pace = Pace(rate * computing, stored)
        assert found.seconds(resident, pace) == pytest.approx(start + 1 / rate + resident.weight_reads)
        assert found.seconds(streamed, pace) == pytest.approx(start + max(1 / rate, streamed.weight_reads))


def test_processes_that_share_prompts_compute_with_one_thread_each() -> None:
    found = made(Task("prune-bound", (32,) * 8, pruning=PruneOptions()))
    way = found.ways[0]
    threads, alone = Pace(1e9, 1e12), Pace(1e9, 1e12, alone=7e8)
    start = START + 6 * DISCOVERY
    assert found.seconds(way, threads) == found.seconds(way, alone)
    shared = way.model_copy(update={"processes": 2})
    ratio = (found.seconds(way, threads) - start) / (found.seconds(shared, alone) - start)
    assert ratio == pytest.approx(1.4, rel=1e-3)


def test_what_is_long_is_known_before_anything_is_measured() -> None:
    short, long = made(Task("verify", (8,))), made(Task("prune-bound", (512,) * 99, pruning=PruneOptions()))
    assert not short.may_be_long(short.ways[0])
    assert long.may_be_long(long.ways[0])
    assert long.seconds(long.ways[0], Pace(1e9, 1e8)) > LONG


def test_products_have_as_many_rows_as_prompts_have_tokens_on_average() -> None:
    assert rows_of(Task("inspect", (8, 24))) == 16
    assert rows_of(Task("inspect", (4096,))) == ROWS
    assert rows_of(Task("prune-bound", (8, 24), pruning=PruneOptions())) == ROWS
    assert rows_of(Task("check", runs=False)) == ROWS


def test_the_pace_is_measured_here() -> None:
    found = made(Task("inspect", (32,)))
    pace = found.pace()
    assert pace.operations > 1e6
    assert pace.bytes > 1e3
    timed = found.timed("cpu")
    assert all(way.seconds is not None and way.seconds > START for way in timed.ways)
    assert [way.seconds for way in found.ways] == [None, None]
