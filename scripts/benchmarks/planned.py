"""What `duat plan` says of memory and time against what processes use."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import DEMO, Row, process_environment, python
from benchmarks.shapes import SHAPES, write

TEXTS = ["--prompt", "def read(path):", "--prompt", "for k in range(10): print(k)"]
COMMANDS = {"inspect": ["--null", "uniform"], "prune-bound": ["--measure", "4"], "check": [], "lora-diff": []}


def planned(_runs: int) -> list[Row]:
    """Each command in a process of its own, with its weights in memory and block by block."""
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / "135M"
        write(shape, SHAPES["135M"])
        moved = _tuned(shape, Path(folder) / "tuned")
        rows = []
        half = ["--dtype", "bfloat16"]
        for what, model, dtype in (("demo", DEMO, []), ("135M", shape, []), ("135M in bfloat16", shape, half)):
            for command, extra in COMMANDS.items():
                tuned = str(DEMO.parent / "adapter" if what == "demo" else moved)
                given = [*([tuned] if command == "lora-diff" else []), *dtype, *extra]
                rows += _rows(what, command, str(model), given, folder)
    return rows


def _tuned(shape: Path, folder: Path) -> Path:
    """The same checkpoint with every tensor moved: of one that is compared with itself no difference is formed."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(shape, folder)
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        moved = {
            name: (one + 0.01 * one.float().std() * torch.randn(one.shape, generator=generator)).to(one.dtype)
            for name, one in load_file(file).items()
        }
        save_file(moved, file, metadata={"format": "pt"})
    return folder


def _rows(what: str, command: str, model: str, extra: list[str], folder: str) -> list[Row]:
    asked = extra if command != "lora-diff" else ["--tuned", *extra]
    said, _, _ = _json(["plan", model, "--for", command, *TEXTS, *asked, "--time"], folder)
    rows = []
    for way in said["ways"]:
        limit = way["peak_memory_bytes"]
        if limit > said["ways"][0]["peak_memory_bytes"]:
            continue
        report, used, seconds = _json([command, model, *extra, *TEXTS, "--memory", str(limit)], folder)
        run, name = report["run"], f"{what}, {command}, {way['weights']}"
        used = max(used, run["peak_memory_bytes"])  # of processes that share prompts
        assert run["planned_memory_bytes"] == way["peak_memory_bytes"], name
        rows += [
            Row(f"{name}: planned memory", way["peak_memory_bytes"] / 2**20, "MiB"),
            Row("used", used / 2**20, "MiB"),
            Row("planned", way["peak_memory_bytes"] / used, "x used", "1 to 1.1"),
            Row("time, planned", way["seconds"] / seconds, "x used", "0.5 to 2"),
        ]
    return rows


def _json(arguments: list[str], folder: str) -> tuple[dict[str, Any], int, float]:
    """The report, the peak memory of the process that made it, told by itself once all is written, and its seconds."""
    out = Path(folder) / "report.json"
    code = (
        "import sys; from duat_cli.cli.main import run; from duat_cli.loading.model.memory import peak_memory; "
        "code = run(sys.argv[1:]); print(peak_memory()); sys.exit(code)"
    )
    command = [*python(code), *arguments, "--json", "-q", "--output", str(out)]
    start = time.perf_counter()
    child = subprocess.run(command, env=process_environment(folder), stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start
    assert child.returncode in (0, 1), arguments
    return json.loads(out.read_text()), int(child.stdout), seconds
