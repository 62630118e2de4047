"""Whole processes, against imports."""

from __future__ import annotations

import sys
import tempfile

from benchmarks.common import DEMO, PROMPT, Row, process_environment, processes, python


def process(runs: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        libraries, help_page, imports, inspect, verify = processes(
            [
                python("import typer, rich"),
                [sys.executable, "-m", "duat_cli", "--help"],
                python(f"import torch, transformers; {_LOAD}"),
                [sys.executable, "-m", "duat_cli", "inspect", "--prompt", PROMPT, "-q"],
                [sys.executable, "-m", "duat_cli", "verify", "--prompt", PROMPT, "-q"],
            ],
            process_environment(folder),
            runs,
        )
    return [
        Row("duat --help", help_page / libraries, "x import typer, rich", "<= 2"),
        Row("importing torch and transformers, loading the demo", imports, "s"),
        Row("duat inspect, demo, one prompt", inspect / imports, "x import and load", "<= 1"),
        Row("duat verify, demo, one prompt", verify / imports, "x import and load"),
    ]


_LOAD = (
    "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; "
    f"A.from_pretrained({str(DEMO)!r}); T.from_pretrained({str(DEMO)!r})"
)
