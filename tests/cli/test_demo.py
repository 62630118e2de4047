"""The command line with nothing faked, on the bundled demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import PATIENCE

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.model.processes import Processes
from duat_cli.results.inspect import InspectReport

PROMPT = ("--prompt", "def main(argv):")
MADE_UP = """
import sys, torch
class Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1
    def device_count(self):
        return 1
    deviceCount = device_count
torch._C._acc.register_python_privateuseone_device_guard(Guard())
torch.accelerator.is_available = lambda: True
from duat_cli.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run duat; the code and the JSON on standard output."""

    def read(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = run([*arguments, "--json", "-q"])
        return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    return read


def test_inspect_is_exact_and_repeatable(report: Any) -> None:
    code, first = report("inspect", *PROMPT, "--terms")
    again = report("inspect", *PROMPT, "--terms")[1]
    assert code == 0
    assert InspectReport.model_validate(first).certificate.exact
    assert first.pop("run")
    assert again.pop("run")
    assert first == again


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["inspect", "demo"], [["--matrices", "m.safetensors"], ["--save", "H", "--save-to", "h"], ["--out", "out"]]),
        (["attribute", "demo"], [["--out", "out"]]),
        (["lora-diff", "demo", "adapter"], [["--out", "out"]]),
        (["check", "demo"], []),
    ],
    ids=["inspect", "attribute", "lora-diff", "check"],
)
def test_processes_share_the_prompts(
    command: list[str],
    written: list[list[str]],
    short: Path,
    report: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As many as torch would take threads, with the numbers of one; not where files are written beside the report."""
    begun, fork = list[int](), Processes._forked

    def counted(one: Processes, *rest: Any) -> Any:
        begun.append(one.count)
        return fork(one, *rest)

    monkeypatch.setattr(Processes, "_forked", counted)
    monkeypatch.chdir(short)
    few = [word for k in range(3) for word in ("--prompt", f"def f{k}():")]
    first = report(*command, *few)[1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for option, *names, file in written:
        report(*command, *few, option, *names, str(tmp_path / file))
    assert begun == []
    shared = report(*command, *few)[1]
    assert begun == [2, 2]
    assert first.pop("run")
    assert shared.pop("run")
    assert first == shared


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_one_process_where_torch_sees_an_accelerator(short: Path) -> None:
    """The threads that gradients start for it do not outlive a fork; here for a device that is made up."""
    few = (word for k in range(3) for word in ("--prompt", f"def f{k}():"))
    words = ["attribute", str(short / "demo"), "--device", "cpu", "--json", "-q", *few]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}  # threads sleep while they wait
    done = subprocess.run(
        [sys.executable, "-c", MADE_UP, *words],
        env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["prompts"]) == 3


def test_verify_and_support(report: Any) -> None:
    assert report("verify", *PROMPT)[1]["certificate"]["exact"]
    code, document = report("support")
    assert (code, document["entries"][0]["status"]) == (0, "exact")


def test_bad_prompt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--prompt", " ", "-q"]) == 2
    assert capsys.readouterr().err == "duat: error: --prompt 1: empty prompt; expected a text\n"
    assert run(["inspect", *PROMPT, "-q", "--layers", "99"]) == 2
    assert capsys.readouterr().err.startswith("duat: error: ")
