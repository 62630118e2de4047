"""Terms of a peak of `attribute` against sums written down by hand, and planned peaks against those of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import PATIENCE

from duat_cli.analysis.plan.attribution import LOGITS, attribution, attribution_reads, predicted
from duat_cli.analysis.plan.memory import shared
from duat_cli.analysis.plan.shape import Shape, shape_of
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.plan.terms import FORKED, STRUCTURE
from duat_cli.analysis.plan.waves import RECORDED_BYTES
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.models.budgets import TARGET_BYTES
from duat_cli.results.plan import Residence


@pytest.fixture
def shape() -> Shape:
    return shape_of(inspect_folder(demo_path()), "float32")


def all_terms(shape: Shape, tokens: list[int], weights: Residence, **options: Any) -> dict[str, int]:
    """The largest addend of each name, over all moments."""
    found: dict[str, int] = {}
    for moment in attribution(shape, Task("attribute", tuple(tokens), **options), weights):
        for term in moment:
            found[term.what] = max(found.get(term.what, 0), term.bytes)
    return found


def test_block_calls_and_logits_are_there(shape: Shape) -> None:
    found = all_terms(shape, [64], "resident")
    assert found["the prompts' own passes"] == 64 * (6 * 192 + 2048 + 64) * 4
    assert found["the output and its gradients"] == LOGITS * 64 * 2048 * 4
    assert found["gradients on their way back"] == 2 * 64 * 192 * 4


def test_prompts_go_one_by_one_or_as_many_as_fit(shape: Shape) -> None:
    what = "the prompts' own passes"
    five, one = (all_terms(shape, [64] * count, "resident") for count in (5, 1))
    assert five.pop("predictions in the report") == 5 * one.pop("predictions in the report")
    assert five == one
    assert all_terms(shape, [64] * 5, "streamed")[what] == 5 * all_terms(shape, [64], "streamed")[what]
    many = Task("attribute", (64,) * 2700)
    waves = attribution_reads(shape, many) / 2
    assert waves == -(-2700 * 64 * (6 * 192 + 64) * 4 // RECORDED_BYTES) > 1
    logits = 2700 * 64 * 2048 * 4
    assert all_terms(shape, [64] * 2700, "streamed")[what] < RECORDED_BYTES + logits
    assert attribution_reads(shape, Task("attribute", (64,), steps=3)) == 5


def test_targets_go_back_together_as_far_as_there_is_room(shape: Shape) -> None:
    one, every = (all_terms(shape, [64], "resident", every_position=e)["gradients in a block"] for e in (False, True))
    assert one == int(8 * 64 * (8 * 192 + 3 * shape.inner))
    assert one < every <= TARGET_BYTES
    carried = all_terms(shape, [64], "resident", every_position=True)["gradients on their way back"]
    assert carried == 2 * 64 * 64 * 192 * 4


def test_the_report_grows_with_its_predictions(shape: Shape) -> None:
    def report(*tokens: int, **more: Any) -> int:
        return predicted(shape, Task("attribute", tokens, **more))

    assert report(8) == 750 * (8 + 6 * (6 + 2)) + 10 * 13_000
    assert report(8, 9) == report(8) + report(9)
    assert report(8, every_position=True) == 8 * report(8)
    assert report(8, top=0) == report(8) - 10 * 13_000
    assert report(8, top=10**9) == report(8, top=6 * 384) < 200 * 2**16  # as many neurons as there are
    many = all_terms(shape, [64] * 400, "resident", every_position=True)["predictions in the report"]
    assert many == int(1.5 * 400 * 64 * report(64))  # also as text


def test_processes_that_share_prompts_hold_what_a_prompt_takes_each(shape: Shape) -> None:
    def own(*tokens: int, processes: int = 2) -> int:
        return shared(shape, Task("attribute", tokens), processes)[-1].bytes

    assert own(64, 64, 64) == own(64, 64) == 2 * own(64, processes=1)
    assert own(8, 64, 16, 32) == own(64, 32) < own(64, 64)
    found = all_terms(shape, [64], "resident")
    alone = own(64, processes=1) - FORKED - 6 * STRUCTURE
    assert found["the prompts' own passes"] < alone < sum(found.values())


CODE = """
import json, sys
from duat_cli.cli.main import run
from duat_cli.loading.model.memory import peak_memory
code = run(sys.argv[1:])
print(json.dumps([code, peak_memory()]))
"""


def used(model: Path, command: str, *arguments: str, out: Path) -> tuple[int, int]:
    """Planned and used bytes of a process, which is started from a small one: it inherits a larger one's peak."""
    words = [sys.executable, "-c", CODE, command, str(model), *arguments]
    words += ["--json", "-q", "--device", "cpu", "--output", str(out)]
    starter = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", starter, *words], stdout=subprocess.PIPE, timeout=PATIENCE, check=True, text=True
    )
    code, peak = json.loads(done.stdout)
    assert code == 0
    return json.loads(out.read_text())["run"]["planned_memory_bytes"], peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "words",
    [
        ["attribute", "--prompt", "def f(x): return x\n" * 60, "--max-tokens", "500"],
        ["attribute", "--prompt", "def f(x): return x\n" * 20, "--max-tokens", "90", "--position", "all"],
        ["compare", "--prompt", "def f(x): return x\n" * 60, "--prompt", "def f(x): return y\n" * 60, "--no-cache",
         "--max-tokens", "400"],
        ["compare", "--prompt", "def f(x): return x\n" * 60, "--prompt", "for k in range(9): y\n" * 60, "--no-cache",
         "--max-tokens", "400", "--patch", "blocks", "--layers", "0"],
    ],
    ids=["attribute", "every position", "compare", "compare --patch"],
)  # fmt: skip
def test_what_is_planned_is_used(words: list[str], three: Path, tmp_path: Path) -> None:
    planned, peak = used(three / "demo", *words, out=tmp_path / "report.json")
    assert 0.9 < planned / peak < 1.1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_texts_with_few_tokens_in_common_take_less_than_is_planned(three: Path, tmp_path: Path) -> None:
    words = ["compare", "--prompt", "def f(x): return x\n" * 60, "--prompt", "for k in range(9): y\n" * 60]
    planned, peak = used(three / "demo", *words, "--no-cache", "--max-tokens", "400", out=tmp_path / "report.json")
    assert 0.95 < planned / peak < 1.25
