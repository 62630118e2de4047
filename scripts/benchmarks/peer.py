"""`duat inspect` against its nearest peer, InterpKit's `decompose`: same model, prompt, machine and libraries."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import DEMO, PROMPT, Row, process_environment

PEER = "interpkit==0.7.0"


def peer(runs: int) -> list[Row]:
    """Both as processes, in turn, each run once before. On a shared machine CPU time says more than the clock."""
    theirs = [str(environment_of(PEER)), "-m", "interpkit.cli.main", "decompose", str(DEMO), PROMPT]
    ours = [sys.executable, "-m", "duat_cli", "inspect", "--prompt", PROMPT, "-q"]
    with tempfile.TemporaryDirectory() as cache:
        environment = process_environment(cache)
        spent = [[_spent(command, environment) for command in (theirs, ours)] for _ in range(runs + 1)][1:]
    (clock, cpu), (our_clock, our_cpu) = (
        [statistics.median(figures) for figures in zip(*column, strict=True)] for column in zip(*spent, strict=True)
    )
    return [
        Row(f"{PEER} decompose, demo, one prompt", clock, "s"),
        Row(f"{PEER} decompose, demo, one prompt, CPU time", cpu, "s"),
        Row("duat inspect, demo, one prompt", our_clock / clock, "x the peer", "< 1"),
        Row("duat inspect, demo, one prompt, CPU time", our_cpu / cpu, "x the peer", "< 1"),
    ]


def _spent(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time, of a process."""
    start, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, cpu


def environment_of(peer: str) -> Path:
    """The interpreter of a peer's own environment, made on first use and kept in the folder of temporary files."""
    wanted = [peer, *(f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers"))]
    folder = Path(tempfile.gettempdir()) / "-".join(["duat-bench", *(w.replace("==", "-") for w in wanted)])
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        ready.touch()
    return python
