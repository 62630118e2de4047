"""Work in forked processes: in order, with modules that stay the same ones, and with what goes wrong said."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from duat_cli.compat.libc import resident_memory
from duat_cli.errors import DuatError, InputError, UnsupportedModelError
from duat_cli.loading.model.processes import Processes, in_turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


class UnreadableError(Exception):
    """Cannot be made anew of its text alone."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(left + right)


def processes(count: int = 2, model: nn.Module | None = None) -> tuple[Processes, list[tuple[int, int, str]]]:
    said: list[tuple[int, int, str]] = []
    return Processes(count, lambda *at: said.append(at), model or nn.Linear(2, 2)), said


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(count: int) -> None:
    shared, _ = processes(count)

    def work(item: int) -> tuple[int, int]:
        time.sleep(0.02 * (item % 3 == 0))  # later items are done first
        return item, os.getpid()

    found = list(shared.each(work, range(7)))
    assert [item for item, _ in found] == list(range(7))
    assert (os.getpid() in {pid for _, pid in found}) == (count == 1)
    assert list(shared.each(work, ())) == []


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_item_is_worked_on_here_before_others_are_forked(count: int) -> None:
    shared, _ = processes(count)
    known: list[int] = []

    def work(item: int) -> tuple[int, int, list[int]]:
        known.append(item)
        return item, os.getpid(), known[:1]

    found = list(shared.first_here(work, range(5)))
    assert [item for item, _, _ in found] == list(range(5))
    assert [pid == os.getpid() for _, pid, _ in found] == [True, *[count == 1] * 4]
    assert all(first == [0] for _, _, first in found)  # what it found is there where the others run
    assert list(shared.first_here(work, ())) == []


def test_there_are_as_many_processes_as_items_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, forked = processes(3)[0], list[int]()
    own = shared._forked

    def counted(*given: Any) -> Any:
        forked.append(len(given[1]))
        return own(*given)

    monkeypatch.setattr(shared, "_forked", counted)
    for items, expected in ((0, []), (1, [0]), (2, [0, 1]), (7, [0, 1, 2])):
        forked.clear()
        assert list(shared.each(lambda item: -item, range(items))) == [-item for item in range(items)]
        assert forked == expected


def test_an_item_is_asked_for_when_a_process_is_free() -> None:
    """What is decided by earlier results can stand in later items, as far as these are there."""
    shared, _ = processes()
    taken: list[int] = []
    for found in shared.each(lambda item: item[0], ((k, len(taken)) for k in range(6))):
        taken.append(found)
    assert taken == list(range(6))
    shared, _ = processes()
    done = multiprocessing.get_context("fork").Value("i", 0)

    def work(item: tuple[int, int]) -> tuple[int, int]:
        with done:
            done.value += 1
        return item

    known: list[int] = []
    for seen, finished in shared.each(work, ((len(known), done.value) for _ in range(8))):
        assert len(known) - 1 <= finished  # of the items before, one can be under way in the other process
        known.append(seen)
    assert all(seen <= k for k, seen in enumerate(known))


def test_modules_are_not_copied_and_tensors_are() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    shared, _ = processes(model=model)
    [(module, value)] = shared.each(lambda item: (model[item], model[0].weight * 2), [1])
    assert module is model[1]
    assert torch.equal(value, model[0].weight * 2)


def test_each_process_has_one_thread_and_no_processes_of_its_own() -> None:
    before = torch.get_num_threads()
    shared, _ = processes()
    torch.set_num_threads(2)
    try:
        inner = list(shared.each(lambda _: (torch.get_num_threads(), list(shared.each(abs, [-1]))), range(2)))
        assert inner == [(1, [1]), (1, [1])]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_is_raised_is_that_of_the_first_item_that_failed() -> None:
    shared, _ = processes()

    def work(item: int) -> int:
        if item == 1:
            time.sleep(0.1)
            raise UnsupportedModelError("the first")
        if item > 1:
            raise InputError("a later one")
        return item

    results = shared.each(work, range(5))
    assert next(results) == 0
    with pytest.raises(UnsupportedModelError, match="the first"):
        next(results)


def test_an_error_that_cannot_travel_is_told() -> None:
    shared, _ = processes()

    def work(item: int) -> Any:
        raise UnreadableError("no", "where")

    with pytest.raises(RuntimeError, match="UnreadableError: nowhere"):
        list(shared.each(work, range(1)))


def test_a_process_that_is_ended_is_said() -> None:
    shared, _ = processes()
    with pytest.raises(DuatError, match=r"one of 2 processes .*\(exit code -9\).* OMP_NUM_THREADS=1"):
        list(shared.each(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(3)))


def test_none_is_left_where_results_are_no_longer_wanted() -> None:
    shared, _ = processes()
    results = shared.each(lambda item: (item, os.getpid()), range(100))
    pids = {next(results)[1] for _ in range(4)}
    results.close()  # type: ignore[attr-defined]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_progress_is_passed_on_and_does_not_go_back() -> None:
    shared, said = processes()

    def work(item: int) -> None:
        time.sleep(0.25)
        shared(9 - item, 9, f"item {item}")

    list(shared.each(work, range(3)))
    assert said
    assert {what for _, _, what in said} <= {f"item {k}" for k in range(3)}
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)


def test_memory_of_the_others_is_counted_with_this_one_s() -> None:
    shared, before = processes()[0], resident_memory()
    list(shared.each(lambda _: float(torch.ones(1 << 24).sum()), range(2)))  # 64 MiB each
    assert shared.memory > before + (64 << 20)


def test_an_iterator_that_ends_inside_the_work_does_not_end_the_prompts() -> None:
    """`map` would stop at the first StopIteration, as if there were no more items."""
    alone = Processes(1, lambda *_: None, nn.Linear(1, 1))
    for results in (in_turn, alone.each, alone.first_here):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(results(lambda _: next(iter(())), range(3)))
