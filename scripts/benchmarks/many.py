"""`inspect --out`: prompts a second, whether memory grows with the prompts, and what a second process brings."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import DEMO, PROMPT, Row, llama_shape, process_environment

FEW, MANY, SHARED = 500, 3000, 64  # prompts
_WORDS = PROMPT.split()


def many(runs: int) -> list[Row]:
    """Each figure once, whatever `runs` is: the sizes make it steady. One thread a process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, lot, shared = (_texts(folder, count) for count in (FEW, MANY, SHARED))
        plain = _report(folder, DEMO, few)
        small, large = (_report(folder, DEMO, file, "--out", str(folder / file.stem)) for file in (few, lot))
        model = folder / "model"
        llama_shape().save_pretrained(model)
        for file in DEMO.glob("token*"):
            shutil.copy(file, model)
        _processes(folder, 1, model, shared, "warm", "--max-tokens", "1")  # the Gram cache
        alone, two = (_processes(folder, count, model, shared, f"by-{count}") for count in (1, 2))
    return [
        Row(f"{FEW} prompts on the demo, plain", plain["seconds"] / FEW, "s a prompt"),
        Row("prompts a second with --out, to plain", plain["seconds"] / small["seconds"], "", ">= 0.8"),
        Row(
            f"peak memory of {MANY} prompts, merging included, to that of {FEW}",
            large["peak_memory_bytes"] / small["peak_memory_bytes"],
            "",
            "<= 1.05",
        ),
        Row(f"one process on {SHARED} prompts, 135M parameters, to two", alone / two, "x", ">= 1.8"),
    ]


def _texts(folder: Path, count: int) -> Path:
    """A line of 12 to 24 words a prompt."""
    drawn, file = random.Random(0), folder / f"prompts-{count}.txt"
    lines = (" ".join(drawn.choices(_WORDS, k=drawn.randint(12, 24))) for _ in range(count))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def _command(model: Path, prompts: Path, *more: str) -> list[str]:
    fixed = ["--null", "uniform", "--json", "-q", "--device", "cpu"]
    return [sys.executable, "-m", "duat_cli", "inspect", str(model), "--prompts", str(prompts), *fixed, *more]


def _report(folder: Path, model: Path, prompts: Path, *more: str) -> dict[str, float]:
    """The report's `run`."""
    environment = process_environment(str(folder / "cache")) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(_command(model, prompts, *more), check=True, capture_output=True, env=environment)
    return json.loads(done.stdout)["run"]


def _processes(folder: Path, count: int, model: Path, prompts: Path, out: str, *more: str) -> float:
    """Seconds until the last of so many has ended."""
    environment = process_environment(str(folder / "cache")) | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count)}
    command = _command(model, prompts, "--out", str(folder / out), *more)
    start = time.perf_counter()
    started = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment | {"RANK": str(rank)})
        for rank in range(count)
    ]
    codes = [process.wait() for process in started]
    assert codes == [0] * count, codes
    return time.perf_counter() - start
