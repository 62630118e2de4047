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
from typing import Any

from benchmarks.common import DEMO, PROMPT, Row, llama_shape, process_environment

FEW, MANY, SHARED = 1000, 10000, 64  # prompts
_WORDS = PROMPT.split()
_LAYERS, _WIDTH = 2, 64  # of the toy


def many(runs: int) -> list[Row]:
    """Each figure once, whatever `runs` is: the sizes make it steady. One thread a process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, lot = (_texts(folder, count) for count in (FEW, MANY))
        shared = _texts(folder, SHARED, words=60)
        plain = _report(folder, DEMO, few)
        kept = _report(folder, DEMO, few, "--out", str(folder / "demo"))
        toy = _saved(_toy(), folder / "toy")
        small, large = (_report(folder, toy, file, "--out", str(folder / file.stem)) for file in (few, lot))
        bare = _captured(folder, toy, few)
        model = _saved(llama_shape(), folder / "model")
        _processes(folder, 1, model, shared, "warm", "--max-tokens", "1")  # the Gram cache
        alone, two = (_processes(folder, count, model, shared, f"by-{count}") for count in (1, 2))
    return [
        Row(f"{FEW} prompts on the demo, plain", plain["seconds"] / FEW, "s a prompt"),
        Row("prompts a second with --out, to plain", plain["seconds"] / kept["seconds"], "", ">= 0.8"),
        Row(f"one prompt under bare capture, {_LAYERS} layers of width {_WIDTH}", bare, "s"),
        Row(
            "prompts a second with --out, to bare capture, start aside",
            bare * (MANY - FEW) / (large["seconds"] - small["seconds"]),
            "",
            ">= 0.8",
        ),
        Row(
            f"peak memory of {MANY} prompts, merging included, to that of {FEW}",
            large["peak_memory_bytes"] / small["peak_memory_bytes"],
            "",
            "<= 1.05",
        ),
        Row(f"one process on {SHARED} prompts of 130 tokens, 135M, to two", alone / two, "x", ">= 1.8"),
    ]


def _toy() -> Any:
    """A llama of random weights that spends its time on calls."""
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, "num_hidden_layers": _LAYERS}
    rows = AutoConfig.from_pretrained(DEMO).vocab_size
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, num_attention_heads=4, num_key_value_heads=4, **shape))


def _saved(model: Any, folder: Path) -> Path:
    """A checkpoint with the demo's tokenizer."""
    model.save_pretrained(folder)
    for file in DEMO.glob("token*"):
        shutil.copy(file, folder)
    return folder


def _captured(folder: Path, model: Path, prompts: Path) -> float:
    """Seconds a prompt of a loop that captures every block and keeps nothing, in a process of one thread."""
    environment = process_environment(str(folder / "cache")) | {"OMP_NUM_THREADS": "1"}
    child = [
        sys.executable,
        str(Path(__file__).parents[1] / "bench.py"),
        "--child",
        "captured",
        str(model),
        str(prompts),
    ]
    done = subprocess.run(child, check=True, capture_output=True, env=environment)
    return float(json.loads(done.stdout)["seconds"])


def captured_child(model: str, prompts: str) -> None:
    """The loop, over all prompts; the model is loaded and discovered before."""
    from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_set
    from duat_cli.analysis.plan.task import Task
    from duat_cli.analysis.session import Session

    wanted = ModelRequest(model, None, None, None, False, "float32", "cpu", None, Task("inspect"))
    loaded, texts = open_set(wanted, PromptRequest(None, prompts, None), lambda *_: None, gpu=0)
    session = Session(loaded, lambda *_: None, cache=False)
    first, *others = (prompt for _, prompt in texts.prompts(lambda _: True))
    session.sweep(first, lambda _run: None)  # also without instruments
    start = time.perf_counter()
    for prompt in others:
        session.sweep(prompt, lambda _run: None)
    print(json.dumps({"seconds": (time.perf_counter() - start) / len(others)}))


def _texts(folder: Path, count: int, words: int | None = None) -> Path:
    """A line of so many words a prompt, else of 12 to 24."""
    drawn, file = random.Random(0), folder / f"prompts-{count}.txt"
    lines = (" ".join(drawn.choices(_WORDS, k=words or drawn.randint(12, 24))) for _ in range(count))
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
