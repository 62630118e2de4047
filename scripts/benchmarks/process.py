"""Whole processes, against imports and the nearest peer."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.common import (
    Row,
    processes,
    python,
)

PROMPT = "def read(path):\n    with open(path) as file:\n        return file.read()"


def process(runs: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DUAT_CACHE": folder}
        libraries, help_page, imports, inspect, verify = processes(
            [
                python("import typer, rich"),
                [sys.executable, "-m", "duat_cli", "--help"],
                python(f"import torch, transformers; {_LOAD}"),
                [sys.executable, "-m", "duat_cli", "inspect", "--prompt", PROMPT, "-q"],
                [sys.executable, "-m", "duat_cli", "verify", "--prompt", PROMPT, "-q"],
            ],
            environment,
            runs,
        )
    rows = [
        Row("duat --help", help_page / libraries, "x import typer, rich", "<= 2"),
        Row("importing torch and transformers, loading the demo", imports, "s"),
        Row("duat inspect, demo, one prompt", inspect / imports, "x import and load", "<= 1.25"),
        Row("duat verify, demo, one prompt", verify / imports, "x import and load"),
    ]
    if importlib.util.find_spec("interpkit") is None:
        return rows
    peer_command = [sys.executable, "-m", "interpkit.cli.main", "decompose", str(_demo()), PROMPT]
    (peer,) = processes([peer_command], dict(os.environ), runs)
    return [*rows, Row("interpkit decompose, demo, one prompt", peer / imports, "x import and load")]


def _demo() -> Path:
    import duat_cli

    return Path(duat_cli.__file__).parent / "demo" / "model"


_LOAD = (
    "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; "
    f"A.from_pretrained({str(Path(__file__).parents[2] / 'duat_cli/demo/model')!r}); "
    f"T.from_pretrained({str(Path(__file__).parents[2] / 'duat_cli/demo/model')!r})"
)
