"""Weights read block by block against weights in memory, on checkpoints of real shapes with random weights."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import DUAT, Row, peak, process_environment, python
from benchmarks.shapes import SHAPES, VOCABULARY, write

PROMPTS = {"135M": (4, 128), "1.1B": (4, 64), "7B": (2, 32)}  # how many, of how many tokens


def streamed(runs: int) -> list[Row]:
    """Each run in a process of its own; both ways in turn."""
    return [row for name in ("135M", "1.1B") for row in _both(name, runs if name == "135M" else 1)]


def large(_runs: int) -> list[Row]:
    """A shape that few machines hold; streamed alone."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), SHAPES["7B"])
        run = _run(folder, "7B", paged=True)
        pruning = _pruned(Path(folder))
    return [
        Row("7B, inspect, 2 prompts of 32 tokens, streamed: peak memory", run["peak"] / 1e9, "GB", "<= 2.5"),
        Row("weights read", run["reads"], "times", "<= 1.1"),
        Row("seconds", run["seconds"], "s"),
        Row("7B, prune-bound, neurons and heads, 8 probes: peak memory", pruning["used"] / 1e9, "GB", "<= 3"),
        Row("planned memory", pruning["planned"] / pruning["used"], "x used", "1 to 1.1"),
        Row("seconds", pruning["seconds"], "s"),
        Row("planned time", pruning["expected"] / pruning["seconds"], "x used", "0.5 to 2"),
    ]


def _pruned(folder: Path) -> dict[str, float]:
    """`prune-bound` of the shape as a command, two prompts of about 30 tokens; memory and time, planned and used."""
    text, report = "def read(path):\n    with open(path) as file:\n        return file.read()", folder / "report.json"
    asked = ["--granularity", "neuron,head", "--probes", "8", "--prompt", text, "--prompt", text.replace("read", "see")]
    asked += ["--memory", "3GB", "--json", "-q", "--output", str(report)]

    def made(*what: str) -> dict[str, Any]:
        command = [*python(DUAT), *what, *asked]
        subprocess.run(command, env=process_environment(str(folder)), check=True)
        answer: dict[str, Any] = json.loads(report.read_text())
        return answer

    ways = made("plan", str(folder), "--for", "prune-bound", "--time")["ways"]
    [way] = [way for way in ways if way["weights"] == "streamed"]
    run = made("prune-bound", str(folder))["run"]
    used, planned = run["peak_memory_bytes"], run["planned_memory_bytes"]
    return {"used": used, "planned": planned, "seconds": run["seconds"], "expected": way["seconds"]}


def _both(name: str, runs: int) -> list[Row]:
    prompts, tokens = PROMPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), SHAPES[name])
        pairs = [[_run(folder, name, paged=paged) for paged in (False, True)] for _ in range(runs)]
    memory, files = ([pair[k] for pair in pairs] for k in (0, 1))
    differing = [pair for pair in pairs if pair[0]["report"] != pair[1]["report"]]
    ratio = statistics.median(run["seconds"] for run in files) / statistics.median(run["seconds"] for run in memory)
    what = f"{name}, inspect, {prompts} prompts of {tokens} tokens"
    return [
        Row(f"{what}: streamed, load included", ratio, "x in memory", "<= 1.25"),
        Row(f"{name}: peak memory in memory", memory[-1]["peak"] / 1e9, "GB"),
        Row(f"{name}: peak memory streamed", files[-1]["peak"] / 1e9, "GB"),
        Row(f"{name}: weights read, streamed", files[-1]["reads"], "times", "<= 1.1"),
        Row(f"{name}: runs whose reports differ in ten digits", len(differing), "", "0"),
    ]


def _run(folder: str, name: str, *, paged: bool) -> dict[str, Any]:
    return peak("streamed", folder, name, int(paged))


def streamed_child(folder: str, name: str, paged: str) -> None:
    """One run; what it took, and the report, its numbers to eleven digits."""
    import time

    import torch
    from transformers.utils import logging

    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.inspect.run import inspect
    from duat_cli.loading.checkpoint.preflight import inspect_folder
    from duat_cli.loading.checkpoint.source import Source
    from duat_cli.loading.model.load import load_files
    from duat_cli.loading.prompts import Prompt

    logging.disable_progress_bar()
    files = inspect_folder(Path(folder))
    count, tokens = PROMPTS[name]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(5, VOCABULARY, (1, tokens), generator=generator) for _ in range(count)]
    start = time.perf_counter()
    loaded = load_files(Source(Path(folder), name, None), files, paged=paged == "1")
    prompts = [Prompt("", str(number), one, number) for number, one in enumerate(ids)]
    report = inspect(loaded, prompts, InspectOptions(cache=False), lambda *_: None)
    spent = time.perf_counter() - start
    reads = loaded.paged.pager.bytes_read / files.total_bytes if loaded.paged is not None else 1.0
    numbers = _rounded(report.model_dump(mode="json", exclude={"run"}))
    print(json.dumps({"seconds": spent, "peak": report.run.peak_memory_bytes, "reads": reads, "report": numbers}))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return f"{value:.10e}" if isinstance(value, float) else value
