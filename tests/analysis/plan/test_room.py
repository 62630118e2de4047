"""What devices can keep beside the run; and a run with a map, whose report is that of one without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from duat_cli.analysis.plan import room as module
from duat_cli.analysis.plan.room import left_on, room_of
from duat_cli.analysis.plan.run import on_device
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import LIBRARIES
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.results.plan import MemoryTerm, Way

GIB = 1 << 30
WAY = Way(
    weights="streamed",
    peak_memory_bytes=3 * GIB,
    terms=[MemoryTerm(what="one block", bytes=3 * GIB)],
    weight_reads=1.0,
    fits=True,
)


def test_on_the_cpu_it_is_what_the_peak_leaves() -> None:
    assert room_of(torch.device("cpu"), WAY, GIB // 2, 16 * GIB) == {"cpu": 16 * GIB - WAY.peak_memory_bytes}


def test_of_gpus_the_one_that_computes_has_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 12 * GIB))
    monkeypatch.setattr(module, "memory_limit", lambda: 16 * GIB)
    page, cpu = GIB // 2, 16 * GIB - LIBRARIES - GIB
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert room_of(second, WAY, page, None) == {"cuda:0": 10 * GIB, "cuda:1": 7 * GIB, "cpu": cpu}
    assert room_of(first, WAY, page, 8 * GIB) == {"cuda:0": 5 * GIB, "cuda:1": 10 * GIB, "cpu": cpu}
    assert left_on(first, None) == 10 * GIB
    assert left_on(first, GIB) == GIB
    task, memory = on_device(first, Task("prune-bound", processes=4), None)
    assert (task.processes, task.gpu, memory) == (1, True, 10 * GIB)


@pytest.fixture
def said(short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The JSON of a command on the first blocks of the demo, or what it says on standard error."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)
    monkeypatch.chdir(short)

    def ask(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run([*words, "--json", "-q", "--device", "cpu"]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if out else err

    return ask


COMMANDS = {
    "inspect": ["inspect", "demo", "--prompt", "The cat", "--null", "uniform"],
    "matrix": ["matrix", "demo", "--layer", "1", "--prompt", "The cat"],
    "attribute": ["attribute", "demo", "--prompt", "The cat"],
    "lora-diff": ["lora-diff", "demo", "adapter", "--prompt", "The cat", "--no-cache"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_report_does_not_depend_on_the_map(said: Any, words: list[str], tmp_path: Path) -> None:
    """Beside weights that are read block by block and kept nowhere."""
    file = tmp_path / "map.json"
    found = []
    for places in ({"": "disk"}, {"": "cpu", "model.layers.0": "disk", "model.layers.1.mlp": "disk"}):
        file.write_text(json.dumps(places))
        report = said(*words, "--device-map", str(file))
        del report["run"]
        found.append(report)
    assert found[0] == found[1]


def test_what_stays_counts_as_planned(said: Any, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    planned = []
    for place in ("disk", "cpu"):
        file.write_text(json.dumps({"": place}))
        report = said(*COMMANDS["inspect"], "--device-map", str(file))
        planned.append(report["run"]["planned_memory_bytes"])
    assert planned[1] - planned[0] > 1 << 20  # the demo's blocks


def test_a_fault_of_the_map_is_one_line(said: Any, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    for content, what in (
        ({"model.layers.0": "cpu"}, "says nothing of "),
        ({"": "cuda:63"}, "device 'cuda:63': not usable here"),
    ):
        file.write_text(json.dumps(content))
        message = said(*COMMANDS["inspect"], "--device-map", str(file), code=2)
        assert message.startswith(f"duat: error: --device-map {file}: ")
        assert what in message
        assert message.count("\n") == 1
