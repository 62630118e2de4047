"""Peak memory is this process's own, whoever started it."""

from __future__ import annotations

import math
import subprocess
import sys
import types

import psutil
import pytest
from children import PATIENCE

from duat_cli.loading.model import memory

OWN = "from duat_cli.loading.model.memory import peak_memory; print(peak_memory())"
WINDOWS = types.SimpleNamespace(rss=1 << 20, peak_wset=42 << 20)
LARGE = 400 << 20  # far above what the imports take


def peak_under(parent: str) -> int:
    """Of a child of a process that runs `parent` first."""
    code = f"import subprocess, sys; {parent}; subprocess.run([sys.executable, '-c', {OWN!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_a_large_parent_is_not_counted() -> None:
    small, large = peak_under("pass"), peak_under(f"held = b'x' * {LARGE}")
    assert 1 << 20 < small < LARGE / 2
    assert large < LARGE / 2


def test_its_own_peak_is() -> None:
    code = f"held = b'x' * {LARGE}; del held; {OWN}"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
    assert LARGE < int(done.stdout) < 2 * LARGE


def test_without_proc_and_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_fields", lambda path: {})
    pytest.importorskip("resource")
    assert memory.peak_memory() > 1 << 20
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(memory, "sys", types.SimpleNamespace(platform="win32"))
    monkeypatch.setattr(psutil, "Process", lambda: types.SimpleNamespace(memory_info=lambda: WINDOWS))
    assert memory.peak_memory() == 42 << 20
    assert memory._of_limit() == float("inf")


def test_the_limit_is_what_is_left_and_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_memory", lambda: 30)
    monkeypatch.setattr(memory, "available_memory", lambda: 12.0)
    assert memory.memory_limit() == 42


def test_the_system_is_asked_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_fields", lambda path: {})
    monkeypatch.setattr(memory, "_of_container", lambda: math.inf)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=6 << 30))
    monkeypatch.setattr(psutil, "swap_memory", lambda: types.SimpleNamespace(free=1 << 30))
    assert memory.available_memory() == min(7 << 30, memory._of_limit())
    assert memory.resident_memory() > 1 << 20
