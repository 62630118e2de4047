"""Freed memory is kept and used again without a page fault, or goes back."""

from __future__ import annotations

import subprocess
import sys

import pytest
from children import PATIENCE

from duat_cli.compat import libc

FAULTS = """
import resource, sys
from duat_cli.compat.libc import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def take():
    block = bytearray(40 << 20)
for _ in range(3):
    take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    child = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(child, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_a_block_that_was_freed_is_used_again() -> None:
    assert faults("kept") < 0.2 * faults("as it is")


HOLES = """
import torch
from duat_cli.compat.libc import resident_memory, return_freed_memory
return_freed_memory()
before, held = resident_memory(), []
for _ in range(40):
    large = torch.ones(4 << 20, dtype=torch.uint8)  # freed, it raises what glibc keeps
    held.append(torch.ones(500 << 10, dtype=torch.uint8))  # kept, it lies behind the next one
    del large
print(resident_memory() - before - sum(tensor.numel() for tensor in held))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_freed_memory_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
    assert int(done.stdout) < 4 << 20


SMALL_HOLES = """
import contextlib, sys
import torch
from duat_cli.compat import libc
if "returned" in sys.argv:
    libc.return_freed_memory()
before = libc.resident_memory()
with libc.small_blocks_returned() if "small" in sys.argv else contextlib.nullcontext():
    freed = [torch.ones((300 if k % 2 else 150) << 10, dtype=torch.uint8) for k in range(200)]
    held = freed[::2]  # each lies behind one that is freed
    del freed
print(libc.resident_memory() - before - sum(tensor.numel() for tensor in held))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
@pytest.mark.parametrize(("how", "given_back"), [(["returned", "small"], True), (["returned"], False)])
def test_small_blocks_go_back_while_weights_are_read(how: list[str], given_back: bool) -> None:
    child = [sys.executable, "-c", SMALL_HOLES, *how]
    done = subprocess.run(child, stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
    assert (int(done.stdout) < 8 << 20) == given_back


def test_small_blocks_go_back_only_where_large_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(libc, "_set", lambda wanted: not asked.append(wanted[libc._M_MMAP_THRESHOLD]))
    monkeypatch.setattr(libc, "_asked", {})
    for setting, then in ((None, []), (libc.return_freed_memory, [128 << 10, 1 << 20]), (libc.keep_freed_memory, [])):
        if setting is not None:
            setting()
        asked.clear()
        with libc.small_blocks_returned():
            pass
        assert asked == then


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc.ctypes, "CDLL", lambda _name: object())
    assert not libc.keep_freed_memory()
    assert not libc.return_freed_memory()


def test_free_pages_are_given_back_once_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for what the passes themselves need, in front of a block and behind it, time and again."""
    resident = iter([500, 480, 470, 500, 517, 530, 490, 537, 540, 500])
    given: list[int] = []
    monkeypatch.setattr(libc, "GROWN", 47)
    monkeypatch.setattr(libc, "resident_memory", lambda: given.append(next(resident)) or given[-1])
    monkeypatch.setattr(libc, "give_back_free_pages", lambda: given.append(0))
    holes = libc.Holes()
    for _ in range(7):
        holes.close()
    # at first, at 530 against 470, at 540 against 490
    assert given == [500, 0, 480, 470, 500, 517, 530, 0, 490, 537, 540, 0, 500]
