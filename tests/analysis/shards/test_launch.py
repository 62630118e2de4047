"""accelerate's own launcher: two machines, here two processes, share the prompts and give the plain report."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.commands import launch
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
    words = ["--multi_gpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", str(free_port()), "--rdzv_backend", "static", "--mixed_precision", "no"]
    words += ["--dynamo_backend", "no", "-m", "duat_cli", *command, "--json", "-q", "--out", str(tmp_path / "out")]

    def machine(rank: int) -> None:
        """Its launcher, which starts a process of duat."""
        os.dup2(os.open(tmp_path / f"said-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        launch.launch_command(launch.launch_command_parser().parse_args(["--machine_rank", str(rank), *words]))

    fork = multiprocessing.get_context("fork")  # this process has imported what a launcher needs
    machines = [fork.Process(target=machine, args=(rank,)) for rank in range(2)]
    for one in machines:
        one.start()
    for one in machines:
        one.join(PATIENCE)
    assert [one.exitcode for one in machines] == [0, 0]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert without_run(said[0]) == ask(*command)
    assert said[1] == ""
    shards = sorted((tmp_path / "out").glob("shard-*"))
    assert [shard.name for shard in shards] == ["shard-0-of-2.jsonl", "shard-1-of-2.jsonl"]
    assert sum(len(shard.read_bytes().splitlines()) for shard in shards) == 6
