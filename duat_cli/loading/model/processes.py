"""Work on many prompts in several processes that share one model.

The layers of a small model are too small for threads to share: threads wait for each other longer than they compute,
and many times as long where other programs run beside them. Forked processes of one thread each share the weights
without a copy, and take one prompt after the other.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from duat_cli.compat.libc import resident_memory
from duat_cli.errors import DuatError
from duat_cli.loading.model.memory import own_memory

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int, str], None]  # (done, total, what is being done)

PAUSE = 0.2  # seconds between two progress messages of a process


class Each(Protocol):
    """A function that is called like `map`, with one iterable."""

    def __call__(self, work: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


def in_turn(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """The results computed in this process, each item once the previous result is taken."""
    for item in items:  # no `map`, which a StopIteration that escapes from `work` would end without a word
        yield work(item)


class _Said(NamedTuple):
    """A message of a process: its progress, a result, or an exception."""

    kind: str
    value: Any
    memory: int = 0
    """Peak bytes so far that are the process's own."""


class Processes:
    """Shares work among processes, each forked as the work begins. It is a progress function itself, in any of the
    processes."""

    def __init__(self, count: int, progress: Progress, model: nn.Module) -> None:
        """model: results refer to its modules, which are not copied with them."""
        self.count, self._progress = count, progress
        self._modules = list(model.modules()) if count > 1 else []
        self._places = {id(module): place for place, module in enumerate(self._modules)}
        self._pipe: Connection | None = None  # in a forked process
        self._spoke = 0.0
        self.memory = 0
        """Peak bytes of all processes that shared work, this one included; 0 where none did."""

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._pipe is None:
            self._progress(done, total, what)
        elif time.monotonic() - self._spoke > PAUSE:
            self._spoke = time.monotonic()
            self._send(self._pipe, _Said("progress", (done, total, what)))

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """work(item) for each item, in order. Other changes that `work` makes are lost where it runs in a forked
        process. An item is asked for when a process is free.

        DuatError where a process is ended from outside. An exception of `work` is raised here, that of the first such
        item.
        """
        return in_turn(work, items) if self.count == 1 else self._shared(work, items)

    def first_here(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Like `each`, but the first item is worked on in this process, so that what it finds out about the model is
        there when others are forked."""
        left = iter(items)
        yield from in_turn(work, itertools.islice(left, 1))
        yield from self.each(work, left)

    def _shared(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        children: dict[Connection, BaseProcess] = {}
        try:
            yield from self._gathered(work, enumerate(items), children)
        finally:
            for pipe, child in children.items():
                child.kill()
                child.join()
                pipe.close()

    def _forked(self, work: Callable[[T], R], children: dict[Connection, BaseProcess]) -> Connection:
        """The pipe to one more process, which is added to the children."""
        ours, theirs = multiprocessing.Pipe()
        child: BaseProcess = multiprocessing.get_context("fork").Process(
            target=self._serve, args=(theirs, [*children, ours], work), daemon=True
        )
        child.start()
        theirs.close()
        children[ours] = child
        return ours

    def _gathered(
        self, work: Callable[[T], R], items: Iterator[tuple[int, T]], children: dict[Connection, BaseProcess]
    ) -> Iterator[R]:
        """The children's results, in the order of the items. There are at most as many children as items."""
        idle, busy = list[Connection](), dict[Connection, int]()
        found: dict[int, _Said] = {}
        memory = dict[Connection, int]()
        first, failed = 0, False  # the first item that has not been given out yet
        far = 0  # progress of the process that is farthest
        while True:
            while not failed and (idle or len(children) < self.count) and (item := next(items, None)) is not None:
                free = idle.pop() if idle else self._forked(work, children)
                busy[free] = item[0]
                self._send(free, item[1])
            if not busy:
                return
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                said = self._received(pipe, children[pipe])
                if said.kind == "progress":
                    done, total, what = said.value
                    far = max(far, done)
                    self(far, total, what)
                    continue
                found[busy.pop(pipe)] = said
                idle.append(pipe)
                failed |= said.kind == "fault"
                memory[pipe] = max(said.memory, memory.get(pipe, 0))
            self.memory = max(self.memory, resident_memory() + sum(memory.values()))
            while first in found:
                said = found.pop(first)
                if said.kind == "fault":
                    raise said.value
                yield said.value
                first += 1

    def _serve(self, pipe: Connection, others: list[Connection], work: Callable[[T], R]) -> None:
        """The loop of a forked process, until its parent hangs up."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in others:
            other.close()
        torch.set_num_threads(1)  # threads do not outlive a fork
        gc.freeze()  # pages that the collector looks at would be copied
        self._pipe, self.count = pipe, 1
        with contextlib.suppress(EOFError, OSError):
            while True:
                item = self._unpickled(pipe.recv_bytes())
                kind, value = _tried(work, item)
                self._send(pipe, _Said(kind, value, own_memory()))

    def _received(self, pipe: Connection, child: BaseProcess) -> _Said:
        try:
            said: _Said = self._unpickled(pipe.recv_bytes())
        except (EOFError, OSError):
            child.join()
            raise DuatError(
                f"one of {self.count} processes that shared the prompts was ended (exit code {child.exitcode}), as the "
                "system does where memory runs out; OMP_NUM_THREADS=1 has one process run them all"
            ) from None
        return said

    def _send(self, pipe: Connection, value: Any) -> None:
        into = io.BytesIO()
        _Pickler(into, self._places).dump(value)
        pipe.send_bytes(into.getvalue())

    def _unpickled(self, data: bytes) -> Any:
        return _Unpickler(io.BytesIO(data), self._modules).load()


class _Pickler(pickle.Pickler):
    """Refers to the model's modules by their places, which are the same on both sides of a fork."""

    def __init__(self, into: io.BytesIO, places: dict[int, int]) -> None:
        super().__init__(into, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places

    def persistent_id(self, value: Any) -> int | None:
        return self._places.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, modules: list[nn.Module]) -> None:
        super().__init__(data)
        self._modules = modules

    def persistent_load(self, place: int) -> nn.Module:
        return self._modules[place]


def _tried(work: Callable[[T], R], item: T) -> tuple[str, R | Exception]:
    try:
        return "found", work(item)
    except Exception as fault:
        return "fault", _portable(fault)


def _portable(fault: Exception) -> Exception:
    """The exception itself, or if it cannot be pickled a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(fault))
    except Exception:
        return RuntimeError(f"{type(fault).__name__}: {fault}")
    return fault
