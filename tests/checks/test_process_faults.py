"""What surrounds a run: signals, full disks, closed streams, odd folders, terminals, tokens, memory.

The letters are those of the list of process faults: P1 to P24, each through `duat check`. What the fake analysis
of tests/cli covers for every command is here once more with nothing faked.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from children import PATIENCE, forked, hear_signals
from running_checks import STEERING, Duat, Outcome, apart

from duat_cli.cli.main import main
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model import memory

QUICK = ("--weights-only", "-q")


@pytest.fixture
def m(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m")
    return tmp_path / "m"


def shell(script: str, **env: str) -> Outcome:
    """A bash line in which $D is duat."""
    python = shlex.quote(sys.executable)
    kept = {name: value for name, value in os.environ.items() if name not in STEERING}
    settings = {
        **kept,
        "D": f"{python} -m duat_cli",
        "PYTHON": python,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        **env,
    }
    done = subprocess.run(
        ["bash", "-c", script], env=settings, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_p1_p2_signals(tmp_path: Path) -> None:
    """It waits for its standard input when the signal comes. An interrupt goes the same way, and is sent in
    tests/cli/terminal/test_streams.py.
    """
    report, baseline = tmp_path / "r.json", tmp_path / "b.json"
    report.write_text("old")
    line = [sys.executable, "-m", "duat_cli", "check", str(demo_path()), "--prompts", "-", "-o", str(report)]
    line += ["--baseline", str(baseline), "--update-baseline", "--report", f"junit={tmp_path / 'new.xml'}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    run = subprocess.Popen(line, env=env, stdin=pipe, stderr=pipe, text=True, preexec_fn=hear_signals)  # noqa: PLW1509 - no threads yet
    assert run.stderr is not None
    while "reading the prompts" not in run.stderr.readline():
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=PATIENCE) == 143
    assert run.stderr.read().endswith("duat: terminated\n")
    assert report.read_text() == "old"  # while a report that was not there yet says why it has no verdict
    assert '<error type="stopped" message="terminated">' in (tmp_path / "new.xml").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.xml", "r.json"]


def test_p3_full_devices(m: Path, duat: Duat) -> None:
    for done in (shell(f"$D check {m} --weights-only --json > /dev/full"), duat("check", m, *QUICK, "-o", "/dev/full")):
        assert done.code == 2
        assert "cannot write: No space left" in done.stderr
        assert done.stderr.count("duat: error") == 1


def test_p4_a_limit_on_files(m: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report, baseline = tmp_path / "r.json", tmp_path / "b.json"
    report.write_text("old")

    def limited(*words: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        main(["check", str(m), *QUICK, *map(str, words)])

    for words in (("-o", report), ("--baseline", baseline, "--update-baseline")):
        Outcome(forked(limited, *words), *capfd.readouterr()).refused("cannot write")
    assert report.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "r.json"]


def test_p5_a_working_folder_that_cannot_be_written(m: Path, duat: Duat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    assert duat("check", m, *QUICK).code == 0


@pytest.mark.parametrize(("case", "code"), [("good_single", "0"), ("w_nan", "1")])
def test_p6_a_reader_that_leaves(case: str, code: str, tmp_path: Path) -> None:
    bad.build(case, tmp_path / "c")
    done = shell(f"$D check {tmp_path / 'c'} {' '.join(QUICK)} --json | head -1 > /dev/null; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.strip() == code
    assert done.stderr == ""


def test_p7_closed_streams(m: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    assert shell(f"$D check {m} {' '.join(QUICK)} -o {report} >&- 2>&- <&-").code == 0
    assert json.loads(report.read_text())["verdict"] == "passed"


@pytest.mark.parametrize("option", ["-o", "--report", "--baseline"])
@pytest.mark.parametrize("name", ["", "missing/r.json"])
def test_p8_targets_come_first(option: str, name: str, tmp_path: Path, duat: Duat) -> None:
    value = f"json={tmp_path / name}" if option == "--report" else tmp_path / name
    more = ["--update-baseline"] if option == "--baseline" else []
    done = duat("check", tmp_path / "nope", option, value, *more)
    done.refused("folder" if name else "")
    assert "nope" not in done.stderr  # which is looked for later


def test_p9_two_at_once(m: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "b.json"
    line = [sys.executable, "-m", "duat_cli", "check", str(m), *QUICK, "--baseline", str(baseline), "--update-baseline"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait(timeout=PATIENCE) for run in runs] == [0, 0]
    assert json.loads(baseline.read_text())["schema_version"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.json", "m"]


FORMS = """
import sys
from duat_cli.cli.main import run
for form in ("junit", "github", "markdown", "sarif", "table"):
    assert run(["check", sys.argv[1], "--weights-only", "--format", form]) == 0
    print("====", flush=True)
"""


def test_p10_p11_a_poor_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "mödel"
    bad.build("st_name_with_escapes", folder)
    env = {"TERM": "dumb", "COLUMNS": "20", "NO_COLOR": "1", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = shell(f"$PYTHON -c {shlex.quote(FORMS)} {folder}", PYTHONIOENCODING="ascii", **env)
    assert done.code == 0, done.stderr
    assert done.text.isascii()
    assert "\x1b" not in done.text
    *others, table, _ = done.stdout.split("====\n")
    assert all(others)
    assert max(map(len, table.splitlines())) <= 20
    assert "integrity.files" in table.replace("\n", "")


@pytest.mark.parametrize("name", ["./nope", "/nope/there", "nope/x", "nope"])
def test_p12_p23_what_is_not_there(name: str, duat: Duat, tmp_path: Path) -> None:
    duat("check", name, "--cache-dir", tmp_path).refused("no such folder")


@pytest.mark.parametrize("name", ["m[bold]x[/red]", "m with spaces", "m\nline", "m\u202eevil", "-m", "m,a:b%"])
@pytest.mark.parametrize("form", ["table", "json", "junit", "github", "markdown", "sarif"])
def test_p13_odd_folder_names(name: str, form: str, tmp_path: Path, duat: Duat) -> None:
    bad.build("w_nan", tmp_path / name)
    done = duat("check", tmp_path / name, *QUICK, "--format", form)
    assert done.code == 1
    assert "\u202e" not in done.text
    if form == "github":
        assert all(line.startswith("::") for line in done.stdout.splitlines())


def test_p14_twice_is_the_same(short: Path, duat: Duat) -> None:
    reports = [duat("check", short / "demo", "--json", "-q", "--prompt", "def f(x):").json for _ in range(2)]
    assert all(report.pop("run") for report in reports)
    assert reports[0] == reports[1]


def test_p15_p16_json_is_one_document(tmp_path: Path, duat: Duat) -> None:
    for name in ("w_nan", "w_inf", "w_all_zero", "st_name_with_escapes"):
        bad.build(name, tmp_path / name)
        done = duat("check", tmp_path / name, "--weights-only", "--json")
        assert done.json["warnings"]  # parsed without NaN and Infinity
        assert done.stdout.isascii()
        assert "{" not in done.stderr


def test_p22_a_token_is_never_printed(m: Path, tmp_path: Path, duat: Duat) -> None:
    (m / bad.CFG).write_text('{"model_type": "hf_abcdefghijklmnop"}')
    done = duat("check", m, "--token", "my-own-secret", HF_TOKEN="hf_abcdefghijklmnop", DUAT_DEBUG="1")
    assert done.code == 2
    assert "hf_abcdef" not in done.text
    assert "my-own-secret" not in done.text
    folder = tmp_path / "hf_abcdefghijklmnop"
    bad.llama(folder)
    done = duat("check", folder, *QUICK, "--json")
    assert done.code == 0
    assert "hf_abcdef" not in done.text


def sparse(folder: Path, elements: int, shards: int) -> None:
    """A checkpoint of that size that takes no room on the disk: its weights are holes, which read as zero."""
    folder.mkdir()
    rows = elements // shards // 1024
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    for number, name in enumerate(names):
        size = rows * 1024 * 2
        entry = {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [0, size]}
        header = json.dumps({f"model.layers.{number}.mlp.up_proj.weight": entry}).encode()
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + size)
    weight_map = {f"model.layers.{i}.mlp.up_proj.weight": name for i, name in enumerate(names)}
    (folder / bad.IDX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / bad.CFG).write_text(json.dumps({"model_type": "llama", "num_hidden_layers": shards}))


@pytest.mark.slow
def test_p24_too_little_memory(tmp_path: Path) -> None:
    """2 GiB of weights under 2 GiB of addresses: refused with both numbers, or streamed."""
    sparse(tmp_path / "big", 1 << 29, 4)
    limit: dict[str, Any] = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))}
    apart("support", tmp_path / "big", process=limit).refused("needs 2.00 GiB", "has", "--weights-only")
    apart("check", tmp_path / "big", process=limit).refused(
        "mlp.up_proj.weight", "shape mismatch"
    )  # no matter of memory
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))}
    done = apart("check", tmp_path / "big", *QUICK, "--json", process=small, OPENBLAS_NUM_THREADS="1")
    assert done.code == 1  # all zero, which is a finding
    assert "integrity.zero_blocks" in done.rules()


def test_memory_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch, duat: Duat) -> None:
    assert memory.available_memory() > 0
    files = inspect_folder(demo_path())
    monkeypatch.setattr(memory, "available_memory", lambda: 6 << 20)
    memory.require_memory(files, "auto")  # 4.4 MB stored
    with pytest.raises(Exception, match=r"needs 0\.01 GiB for its weights as float32"):
        memory.require_memory(files, "float32")
    duat("verify").refused("needs", "--dtype auto")
