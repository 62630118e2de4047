"""Results never take the place of what a run reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import duat_cli as duat
from duat_cli.api.target import refuse_overwriting
from duat_cli.cli.main import run
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model, an adapter, a folder of results and files of every kind."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo_path(), "m")
    shutil.copytree(demo_adapter_path(), "a")
    Path("p.txt").write_text("the cat sat\na dog ran\n")
    Path("s.toml").write_text('extends = "default"\n')
    assert run(["check", "m", "--weights-only", "--json", "-o", "c.json", "-q"]) == 0
    assert run(["inspect", "m", "--prompts", "p.txt", "--null", "uniform", "--out", "kept", "-o", "r.txt", "-q"]) == 0
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_result_takes_the_place_of_what_is_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to("m", target_is_directory=True)
    before = contents(here)
    for line, reader in {
        "merge kept -o kept/manifest.json": "DIR kept",
        "inspect m --prompts p.txt --out kept -o kept/prompts.keys": "--out kept",
        "check m --weights-only -o m/config.json": "MODEL m",
        "check link --weights-only -o m/tokenizer.json": "MODEL link",
        "check m --weights-only --report json=./m/config.json --report sarif=x": "MODEL m",
        "check m --adapter a -o a/adapter_config.json": "--adapter a",
        "check m --baseline m/config.json --update-baseline": "MODEL m",
        "lora-diff m a -o a/adapter_config.json": "TUNED a",
        "report c.json -o c.json": "FILE c.json",
        "inspect m --prompts p.txt -o p.txt": "--prompts p.txt",
        "inspect m --matrices m/model.safetensors": "MODEL m",
        "matrix m -o m/model.safetensors": "MODEL m",
        "check m --weights-only --policy s.toml -o s.toml": "--policy s.toml",
        "check m --prompts p.txt -o p.txt": "--prompts p.txt",
        "prune-bound m --holdout p.txt --granularity head --export m/config.json": "MODEL m",
        "plan m --holdout p.txt -o p.txt": "--holdout p.txt",
    }.items():
        capsys.readouterr()
        assert run([*line.split(), "-q"]) == 2, line
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1, line
        assert said[0].endswith(f"would overwrite a file that is read, of {reader}; give another name"), line
    assert run(["check", "m", "--prompts", "p.txt", "-o", "p.txt", "--nope"]) == 2
    for call in (
        lambda: duat.inspect("m", prompts="a", matrices="m/model.safetensors"),
        lambda: duat.matrix("m", output="m/model.safetensors"),
        lambda: duat.check("m", weights_only=True, baseline="m/config.json", update_baseline=True),
    ):
        with pytest.raises(InputError, match="would overwrite a file that is read, of model m; give another name"):
            call()
    assert contents(here) == before


def test_a_file_of_its_own_is_written_wherever_it_lies(here: Path) -> None:
    for line in (
        "check m --weights-only -o m/report.json",
        "check m --weights-only -o m/report.json",
        "check m --weights-only --baseline m/baseline.json --update-baseline",
        "check m --weights-only --baseline m/baseline.json --update-baseline",
        "merge kept -o kept/report.json",
        "report m/report.json -o m/report.html",
    ):
        assert run([*line.split(), "-q"]) == 0, line
    with pytest.raises(InputError, match="--export 'x': is named twice, by --output as well"):
        refuse_overwriting([("--output", "./x"), ("--export", "x")], [])
    refuse_overwriting([("-o", "-"), ("--report", "-"), ("a", None), ("b", "/dev/null")], [("--prompts", "/dev/null")])


def test_a_file_is_the_same_by_whatever_name(here: Path) -> None:
    (here / "one.json").write_text("{}")
    os.link(here / "one.json", here / "two.json")
    with pytest.raises(InputError, match=r"-o .two\.json.: would overwrite .*, of --report one\.json"):
        refuse_overwriting([("-o", "two.json")], [("--report", "one.json")])


def test_a_home_is_one_in_results_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of --output=~/x as it is."""
    monkeypatch.setenv("HOME", str(here))
    Path("b.txt").write_text("a line of its own\n")
    assert run(["inspect", "~/m", "--prompts=~/b.txt", "--null=uniform", "--out=~/runs", "-o", "~/r.txt", "-q"]) == 0
    assert run(["merge", "~/runs", "--json", "--output=~/runs.json", "-q"]) == 0
    assert run(["report", "~/runs.json", "--output=~/runs.html", "-q"]) == 0
    assert all(Path(name).exists() for name in ("runs/manifest.json", "r.txt", "runs.json", "runs.html"))
    assert not Path("~").exists()
    assert run(["check", "~/m", "-o", "~/m/config.json", "-q"]) == 2
