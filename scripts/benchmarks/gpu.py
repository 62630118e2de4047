"""`inspect` on a GPU: an 8B shape that stays there, and a 70B shape that is read through it block by block."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import DUAT, PROMPT, Row, process_environment, python
from benchmarks.shapes import SHAPES, write

TOKENS = (128, 1024)
BLOCKS_70B = 4  # of 80: memory does not depend on their number
GPU_70B = "8GB"
MANY = 1000  # prompts of a set, of which as many as fit run in one batch


def gpu(runs: int) -> list[Row]:
    """Rows of the GPU of this machine; 23 GB in the temporary folder."""
    import torch

    name = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "8B", Path(folder) / "70B"
        write(small, SHAPES["8B"])
        rows = _command(f"8B shape on {name}", small, folder, []) + _warm(small, runs)
        shutil.rmtree(small)
        write(large, dataclasses.replace(SHAPES["70B"], blocks=BLOCKS_70B))
        what = f"{BLOCKS_70B} of 80 blocks of a 70B shape, streamed within {GPU_70B}"
        return [*rows, *_command(what, large, folder, ["--memory", GPU_70B])]


def _command(what: str, model: Path, cache: str, extra: list[str]) -> list[Row]:
    """Start to end, and the GPU's memory, planned and used."""
    asked = ["inspect", str(model), "--device", "cuda", "--null", "uniform", "--prompt", PROMPT, "--json", "-q", *extra]
    start = time.perf_counter()
    done = subprocess.run(
        [*python(DUAT), *asked], env=process_environment(cache), check=True, stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - start
    report: dict[str, Any] = json.loads(done.stdout)
    run, used = report["run"], report["run"]["gpu_memory_bytes"]
    return [
        Row(f"{what}: `duat inspect`, start to end", seconds, "s"),
        Row("its GPU memory", used / 1e9, "GB", "<= 8" if extra else ""),
        Row("planned", run["planned_memory_bytes"] / used, "x used", "1 to 1.1"),
        Row("certificate", report["certificate"]["relative_error"], "", "<= 1e-4"),
    ]


def _warm(folder: Path, runs: int) -> list[Row]:
    """A prompt at a time, weights and Gram matrices in the GPU's memory, against one plain eager pass."""
    import torch

    from duat_cli.analysis.inspect.batch import sizes, sweep_batch
    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.inspect.run import sweep_prompts
    from duat_cli.analysis.session import Session
    from duat_cli.loading.checkpoint.preflight import inspect_folder
    from duat_cli.loading.checkpoint.source import Source
    from duat_cli.loading.model.load import load_files
    from duat_cli.loading.prompts import Prompt

    start = time.perf_counter()
    loaded = load_files(Source(folder, "8B", None), inspect_folder(folder), device="cuda")
    rows = [Row("8B shape, loaded as float32", time.perf_counter() - start, "s")]
    session = Session(loaded, lambda *_: None, cache=False)
    for tokens in TOKENS:
        ids = torch.randint(5, 32000, (1, tokens), generator=torch.Generator().manual_seed(1))
        there = ids.to("cuda")

        @torch.no_grad()
        def plain(there: torch.Tensor = there) -> None:
            loaded.model(
                input_ids=there, attention_mask=torch.ones_like(there), use_cache=False,
                output_attentions=True, output_hidden_states=True,
            )  # fmt: skip

        def inspected(ids: torch.Tensor = ids) -> None:
            sweep_prompts(session, [Prompt("", "0", ids, 0)], InspectOptions(), lambda *_: None)

        together = sizes(session, InspectOptions(), MANY)(tokens)

        def batched(ids: torch.Tensor = ids, together: int = together) -> None:
            assert sweep_batch(session, together * [Prompt("", "0", ids, 0)], InspectOptions()) is not None

        base, warm, batch = _timed(plain, runs), _timed(inspected, runs), _timed(batched, runs)
        rows += [
            Row(f"plain forward pass, {tokens} tokens", base, "s"),
            Row("all of inspect, warm", warm / base, "x plain", "<= 1.3"),
            Row(f"each of {together} prompts in one batch", batch / together / base, "x plain", "<= 1.3"),
        ]
    return rows


def _timed(function: Callable[[], object], runs: int) -> float:
    """Median seconds until the GPU is done."""
    import torch

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(runs))
