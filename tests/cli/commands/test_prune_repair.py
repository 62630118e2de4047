"""`duat prune-bound --repair` with nothing faked, on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paging import streaming
from pruning import WORDS, save
from safetensors import safe_open

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.errors import InputError
from duat_cli.results.prune.report import PruneReport

FAST = ("--probes", "8", "--measure", "4", "-q")


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    lines = [" ".join(WORDS[(k * step) % 20] for step in range(1, 12)) + f" {WORDS[k // 20]}" for k in range(39)]
    for name, part in (("choose", lines[:3]), ("holdout", lines[3:19]), ("fit", lines[17:39])):
        (folder / f"{name}.txt").write_text("\n".join(part) + "\n")
    return folder


def asked(llama: str, texts: Path, *more: str) -> list[str]:
    return ["prune-bound", llama, "--prompts", str(texts / "choose.txt"), "--holdout", str(texts / "holdout.txt"),
            "--exceed", "0.2", "--granularity", "neuron", "--metric", "hidden", *FAST, "--repair", *more]  # fmt: skip


@pytest.fixture(scope="module")
def smaller(llama: str, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repaired checkpoint, `model`, and its report, `report.json`."""
    folder = tmp_path_factory.mktemp("smaller")
    more = ["--budget", "0.2", "--uniform", "--set", "9", "--apply", str(folder / "model"), "--json"]
    more += ["-o", str(folder / "report.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "calm", lambda talk: None)
        assert run(asked(llama, texts, "--calibration", str(texts / "fit.txt"), *more)) == 0
    return folder


def report_of(folder: Path) -> PruneReport:
    return PruneReport.model_validate(json.loads((folder / "report.json").read_text()))


def test_the_report_of_a_repair(smaller: Path) -> None:
    found = report_of(smaller)
    [plan] = found.plans
    assert plan.repair is not None
    assert (plan.repair.calibration_prompts, plan.repair.calibration_tokens) == (22, 22 * 12)
    assert 0 < plan.repair.refitted + plan.repair.unchanged <= 6
    here = {one.removed: one for one in plan.repair.chosen_on}
    assert plan.measured == here[plan.removed].mean_after <= 0.2
    assert all(one.mean_after <= one.mean_before for one in here.values())
    # two prompts of the file are held out too: they are left out of the test
    assert any("2 of 16 held-out prompts are left out" in text for text in found.warnings)
    held = {one.removed: one for one in plan.repair.held_out}
    assert {one.removed: one.mean for one in plan.held_out} == {k: one.mean_after for k, one in held.items()}
    assert held[plan.removed].prompts == 14
    assert plan.guarantee is not None
    assert plan.guarantee.removed in (0, *held)


def test_the_table_shows_damage_without_repair_and_with_it_where_the_set_cannot_be_written(
    llama: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted to the prompts that choose: three, so fewer tokens than inputs."""

    def full(*_: object, **__: object) -> None:
        raise InputError("No space left on device")

    monkeypatch.setattr("duat_cli.analysis.prune.run.apply_terms", full)
    assert run(asked(llama, texts, "--set", "3", "--apply", str(tmp_path / "out"))) == 2
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    assert "Repair: damage without it and with it, relative" in text
    assert "refitted to 36 tokens of 3 prompts" in text
    assert "36 calibration tokens are fewer than the inputs of some layers" in text
    assert "Written" not in text
    assert "No space left" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--calibration", "x.txt"], "give --repair as well"),
        (["--repair", "--ablate", "mean"], "use --ablate zero"),
        (["--repair", "--calibration", "none.txt"], "error: --calibration none.txt: cannot be read"),
        (["--holdout", "none.txt"], "error: --holdout none.txt: cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], says: str, llama: str, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prune-bound", llama, "--prompts", str(texts / "choose.txt"), *FAST, *options]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_weights_that_are_read_block_by_block_are_refused(
    llama: str, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming():
        assert run(asked(llama, texts)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("duat: error:")]
    assert len(errors) == 1
    assert "--repair" in errors[0]
    assert "read block by block" in errors[0]


def test_a_repaired_checkpoint_is_in_the_report(llama: str, smaller: Path) -> None:
    written = report_of(smaller).written
    assert written is not None
    assert written.repaired
    assert (written.terms, written.removed_neurons, written.zeroed) == (9, 3, 0)
    assert written.error <= 1e-6
    assert written.bytes_after < written.bytes_before
    assert (written.measured_on, written.prompts, written.tokens) == ("held out", 14, 14 * 11)
    assert written.perplexity_after is not None
    with (
        safe_open(Path(llama) / "model.safetensors", "pt") as old,
        safe_open(smaller / "model" / "model.safetensors", "pt") as new,
    ):
        name = "model.layers.1.mlp.down_proj.weight"
        before, after = old.get_tensor(name), new.get_tensor(name)
    assert after.shape[1] == before.shape[1] - 3
    columns = {tuple(column.tolist()) for column in before.T}
    assert sum(tuple(column.tolist()) in columns for column in after.T) < after.shape[1]  # refitted, not cut alone
