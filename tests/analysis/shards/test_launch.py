"""accelerate's own launcher: two machines, here two processes, share the prompts and give the plain report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import PATIENCE, free_port


def without_run(text: str) -> str:
    report = json.loads(text)
    del report["run"]
    return json.dumps(report)


@pytest.mark.slow
def test_two_machines_of_accelerate_launch(
    two_layers: Path, few: Path, ask: Callable[..., str], tmp_path: Path
) -> None:
    command = ["inspect", str(two_layers), "--prompts", str(few), "--null", "uniform", "--no-cache", "--device", "cpu"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    port = str(free_port())
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_machines", "2", "--num_processes", "2"]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--rdzv_backend", "static"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "duat_cli", *command, "--json", "-q"]
    launch += ["--out", str(tmp_path / "out")]
    machines = [start(*launch[:1], "--machine_rank", str(rank), *launch[1:]) for rank in range(2)]
    said = [machine.communicate(timeout=PATIENCE) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert without_run(said[0][0]) == ask(*command)
    assert said[1][0] == ""
    shards = sorted((tmp_path / "out").glob("shard-*"))
    assert [shard.name for shard in shards] == ["shard-0-of-2.jsonl", "shard-1-of-2.jsonl"]
    assert sum(len(shard.read_bytes().splitlines()) for shard in shards) == 6
