"""The life of a baseline: made on demand, compared, refused where it is not ours, renewed with every change named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
import torch
from running_checks import Duat
from safetensors.torch import load_file, save_file

from duat_cli.checks.baseline import BaselineModel, identity, may_be_of
from duat_cli.cli.main import run
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.results import prompts
from duat_cli.text import natural

QUICK = ("--prompt", "hello", "-q")
UNTRAINED = {"behaviour.loss"}  # warns: a random model is no better than the uniform distribution


@pytest.fixture
def m(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline of every `m`, which is the same model each time."""
    folder = tmp_path_factory.mktemp("first")
    bad.llama(folder / "m")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duat_cli.cli.terminal.libraries.calm", lambda talk: None)
        arguments = [*QUICK, "--baseline", str(folder / "b.json"), "--update-baseline"]
        assert run(["check", str(folder / "m"), *arguments]) == 0
    return folder / "b.json"


@pytest.fixture
def made(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(first, tmp_path))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))


def test_the_same_model_passes_its_own_baseline(m: Path, made: Path, duat: Duat) -> None:
    before = made.read_bytes()
    done = duat("check", m, *QUICK, "--baseline", made, "--json")
    assert done.code == 0
    assert {
        f"drift.{group}" for group in ("weights", "operator", "density", "coupling", "terms", "summary")
    } <= done.rules("passed")
    assert done.json["baseline"]["status"] == "compared"
    assert made.read_bytes() == before


def test_prompts_that_no_report_lists_are_compared(
    m: Path, tmp_path: Path, duat: Duat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A baseline of a report that lists all is one of a report that lists few, and the last prompt of all counts."""
    texts, file, made = [f"text {k}" for k in range(6)], tmp_path / "texts.txt", tmp_path / "b.json"
    words = ("check", m, "--prompts", file, "-q", "--baseline", made)
    file.write_text("\n".join(texts))
    duat(*words, "--update-baseline")
    whole = made.read_text()
    monkeypatch.setattr(prompts, "LISTED", 4)
    monkeypatch.setattr(prompts, "FIRST", 2)
    done = duat(*words, "--json")
    assert (done.code, done.json["baseline"]["status"]) == (0, "compared")
    assert (len(done.json["prompts"]), done.json["prompt_set"]["count"]) == (2, 6)
    duat(*words, "--update-baseline")
    assert made.read_text() == whole
    file.write_text("\n".join([*texts[:-1], "text 9"]))
    duat(*words).refused("another prompt set (6 prompts")
    file.write_text("\n".join(reversed(texts)))
    duat(*words).refused("another prompt set (6 prompts", "in another order")


def test_the_file_reads_well(made: Path, m: Path, duat: Duat) -> None:
    text = made.read_text()
    content = json.loads(text, parse_constant=pytest.fail)
    keys = list(content["metrics"])
    assert keys == sorted(keys, key=natural)
    tables = [list(content[table]) for table in ("declared", "shapes")]
    assert all(table == sorted(table, key=natural) for table in tables)
    assert len(text.splitlines()) == len(keys) + sum(map(len, tables)) + len(content) + 5  # one entry a line
    assert {key.split(".")[0] for key in keys} == {"behaviour", "blocks", "integrity", "summary", "weights"}
    assert not any("certificate" in key or "dense_bytes" in key for key in keys)
    again = made.with_name("c.json")
    duat("check", m, *QUICK, "--baseline", again, "--update-baseline")
    assert again.read_text() == text


# --- baselines of schema version 1 ------------------------------------------------------------------------------

FIRST = Path(__file__).parents[1] / "fixtures" / "baseline_0_1_0.json"


def test_a_baseline_written_by_0_1_0_passes(duat: Duat, tmp_path: Path) -> None:
    done = duat("check", demo_path(), "-q", "--baseline", FIRST, "--json")
    assert done.code == 0
    assert done.findings("failed") == done.findings("warned") == []
    assert {f"drift.{g}" for g in ("weights", "integrity", "operator", "density", "coupling", "terms")} <= done.rules(
        "passed"
    )
    assert [w for w in done.json["warnings"] if "schema version 1" in w and "--update-baseline" in w]


@pytest.fixture
def first_of_weights(tmp_path: Path) -> Path:
    """What 0.1.0 wrote of the demo with --weights-only."""
    content = json.loads(FIRST.read_text())
    kept = {k: v for k, v in content["metrics"].items() if k.startswith(("weights.", "integrity."))}
    file = tmp_path / "first.json"
    file.write_text(json.dumps({**content, "dtype": None, "prompts": None, "metrics": kept}))
    return file


@pytest.mark.parametrize("rank", [1, 192])
def test_a_first_baseline_still_finds_drift(rank: int, demo: Path, first_of_weights: Path, duat: Duat) -> None:
    torch.manual_seed(rank)
    name = "model.layers.2.self_attn.q_proj.weight"
    state = load_file(demo / bad.W)
    rows, columns = state[name].shape
    change = torch.randn(rows, rank) @ torch.randn(rank, columns)
    # no change of the norm: it must be the sketch that tells
    change -= (change * state[name]).sum() / state[name].float().square().sum() * state[name]
    moved = state[name] + 0.1 * change / change.norm() * state[name].float().norm()
    state[name] = (moved / moved.norm() * state[name].float().norm()).to(state[name].dtype)
    save_file(state, demo / bad.W, metadata={"format": "pt"})
    done = duat("check", demo, "--weights-only", "-q", "--baseline", first_of_weights, "--json")
    assert done.code == 1
    assert [o["where"] for o in done.findings()] == [f"weights.{name}"]
    assert 0.02 < done.findings()[0]["measured"] < 0.3


def test_a_first_baseline_of_another_model_is_refused(demo: Path, first_of_weights: Path, duat: Duat) -> None:
    torch.manual_seed(0)
    state = {k: torch.randn(v.shape).to(v.dtype) if v.ndim > 1 else v for k, v in load_file(demo / bad.W).items()}
    save_file(state, demo / bad.W, metadata={"format": "pt"})
    for update in ([], ["--update-baseline"]):
        done = duat("check", demo, "--weights-only", "-q", "--baseline", first_of_weights, *update)
        done.refused("another model", "nothing in common")


def test_a_first_baseline_is_renewed_and_nothing_but_the_schema_and_last_digits_change(
    first_of_weights: Path, duat: Duat
) -> None:
    done = duat(
        "check", demo_path(), "--weights-only", "-q", "--baseline", first_of_weights, "--update-baseline", "--json"
    )
    assert done.code == 0
    schema, *norms = done.json["baseline"]["changes"]
    assert schema == {"key": "schema_version", "old": "1", "new": "3"}
    for change in norms:  # float32 sums depend on their order
        old, new = (float(change[side].split()[1]) for side in ("old", "new"))
        assert old == pytest.approx(new, rel=1e-5)
    assert json.loads(first_of_weights.read_text())["schema_version"] == 3
    done = duat("check", demo_path(), "--weights-only", "-q", "--baseline", first_of_weights, "--json")
    assert done.code == 0
    assert not any("schema version" in w for w in done.json["warnings"])


# --- keys and files -----------------------------------------------------------------------------------------------


def test_nulls_and_own_terms_are_no_metrics(made: Path) -> None:
    """A baseline of an earlier version has neither; they must not show as new ones."""
    metrics = json.loads(made.read_text(encoding="utf-8"))["metrics"]
    assert any(".terms.dynamic." in key for key in metrics)
    assert [key for key in metrics if ".null." in key or ".terms.own." in key] == []


@pytest.mark.parametrize("ci", ["", "true"])
def test_p17_p21_it_is_never_made_unasked(ci: str, m: Path, tmp_path: Path, duat: Duat) -> None:
    duat("check", m, *QUICK, "--baseline", tmp_path / "none.json", CI=ci).refused("no such file", "--update-baseline")
    duat("check", m, *QUICK, "--update-baseline", CI=ci).refused("--baseline FILE")
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("name", ["CI", "PRE_COMMIT"])
def test_a_gate_does_not_pass_on_the_demo_by_mistake(name: str, duat: Duat) -> None:
    duat("check", "--weights-only", **{name: "true"}).refused("MODEL missing")
    assert duat("check", "--weights-only").code == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_version": 4}, ("newer",)),
        ({"schema_version": 0}, ("schema_version",)),
        ({"schema_version": "1"}, ("schema_version",)),
        ({"model": {"model_type": "gpt2", "hidden_size": 32}}, ("another model", "gpt2")),
        ({"model": {"model_type": "llama", "hidden_size": 64}}, ("another model", "64")),
        ({"dtype": "bfloat16"}, ("bfloat16", "float32")),
        ({"prompts": {"sha256": "0", "count": 1, "tokens": 5}}, ("another prompt set",)),
        ({"metrics": {"a": "high"}}, ("metrics.a: a valid number, got 'high'",)),
        ({"metrics": {"weights.a": [1.0]}}, ("metrics.weights.a: a norm", "[1.0]")),
        ({"metrics": {"weights.a": [-1.0] * 9}}, ("metrics.weights.a: a norm, which is never negative", "[-1.0, ")),
        ({"extra": 1}, ("extra",)),
    ],
)
def test_p17_what_is_not_ours_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], m: Path, made: Path, duat: Duat
) -> None:
    edit(made, **changes)
    duat("check", m, *QUICK, "--baseline", made).refused(str(made), *words)


@pytest.mark.parametrize("field", ["text_config", "llm_config"])
def test_of_several_models_the_text_model_tells_whose_a_baseline_is(field: str) -> None:
    """And baselines that were written before its config was found there stay what they are."""
    config = {"model_type": "several", field: {"model_type": "llama", "hidden_size": 32}}
    files = CheckpointFiles(Path(), config, (), {}, (), 0, {})
    assert identity(files) == BaselineModel(model_type="llama", hidden_size=32)
    assert may_be_of(identity(files), files)
    assert may_be_of(BaselineModel(model_type="several", hidden_size=None), files)
    assert not may_be_of(BaselineModel(model_type="gpt2", hidden_size=None), files)
    assert not may_be_of(BaselineModel(model_type="llama", hidden_size=64), files)


def test_a_baseline_without_a_width_is_one_of_this_model(m: Path, made: Path, duat: Duat) -> None:
    edit(made, model={"model_type": "llama", "hidden_size": None})
    done = duat("check", m, *QUICK, "--baseline", made, "--json")
    assert (done.code, done.json["baseline"]["status"]) == (0, "compared")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 1}', '{"metrics": NaN}'])
def test_p17_what_is_no_baseline_is_refused(content: str, m: Path, made: Path, duat: Duat) -> None:
    made.write_text(content)
    duat("check", m, *QUICK, "--baseline", made).refused(str(made))


def test_p17_another_model_of_the_same_shape(made: Path, tmp_path: Path, duat: Duat) -> None:
    bad.llama(tmp_path / "other", seed=1)
    duat("check", tmp_path / "other", *QUICK, "--baseline", made).refused("another model", "nothing in common")
    done = duat("check", tmp_path / "other", *QUICK, "--baseline", made, "--update-baseline")
    done.refused("another model")  # the answer to a wrong file is not to overwrite it


def test_p17_the_run_differs(m: Path, made: Path, duat: Duat) -> None:
    duat("check", m, *QUICK, "--baseline", made, "--dtype", "float64").refused("--dtype", "float64")
    duat("check", m, "--prompt", "bye", "--baseline", made).refused("another prompt set")


def test_a_foreign_baseline_is_refused_before_the_model_runs(
    m: Path, made: Path, tmp_path: Path, duat: Duat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the config before anything is loaded; by weights, dtype and prompts before the first pass."""

    def never(*args: object, **options: object) -> None:
        raise AssertionError("it ran")

    run = "duat_cli.analysis.check.run"
    monkeypatch.setattr(f"{run}.run_of", never)
    check = ("--baseline", made)
    assert "it ran" in duat("check", m, *QUICK, *check).stderr  # its own model would run
    duat("check", m, "--prompt", "bye", *check).refused("another prompt set")
    duat("check", m, *QUICK, *check, "--dtype", "float64").refused("--dtype")
    bad.llama(tmp_path / "other", seed=1)
    duat("check", tmp_path / "other", *QUICK, *check).refused("nothing in common")
    monkeypatch.setattr(f"{run}.open_reading", never)
    bad.llama(tmp_path / "wide", hidden_size=64)
    duat("check", tmp_path / "wide", *QUICK, *check).refused("belongs to another model, llama of width 32")


def test_p18_a_metric_that_vanished(m: Path, made: Path, duat: Duat) -> None:
    metrics = json.loads(made.read_text())["metrics"]
    edit(made, metrics=metrics | {"blocks.7.density.structural": 0.5, "weights.gone": [1.0] * 9})
    done = duat("check", m, *QUICK, "--baseline", made, "--json")
    assert done.code == 1
    assert [(o["rule"], o["block"]) for o in done.findings()] == [("drift.vanished", 7), ("drift.vanished", None)]
    assert "disappeared" in done.findings()[0]["message"]


def test_a_metric_that_the_baseline_lacks_warns(m: Path, made: Path, duat: Duat) -> None:
    metrics = json.loads(made.read_text())["metrics"]
    del metrics["summary.dynamic_share"]
    edit(made, metrics=metrics)
    done = duat("check", m, *QUICK, "--baseline", made, "--json")
    assert done.code == 0
    assert done.rules("warned") == {"drift.new", *UNTRAINED}


def test_an_improvement_says_that_the_baseline_is_stale(m: Path, made: Path, duat: Duat, tmp_path: Path) -> None:
    metrics = json.loads(made.read_text())["metrics"]
    edit(made, metrics=metrics | {"integrity.constant_heads": 3.0})
    done = duat("check", m, *QUICK, "--baseline", made, "--json")
    assert done.code == 0
    [stale] = [o for o in done.findings("warned") if o["rule"] not in UNTRAINED]
    assert (stale["rule"], stale["where"]) == ("drift.stale", "integrity.constant_heads")
    assert "stale" in stale["message"]
    policy = tmp_path / "p.toml"
    policy.write_text('[drift.tolerance]\n"summary.effective_context" = { better = "lower" }\n')
    edit(made, metrics=metrics | {"summary.effective_context": 50.0})
    done = duat("check", m, *QUICK, "--baseline", made, "--policy", policy, "--json")
    assert (done.code, done.rules("warned")) == (0, {"drift.stale", *UNTRAINED})
    edit(made, metrics=metrics | {"summary.effective_context": 0.1})
    done = duat("check", m, *QUICK, "--baseline", made, "--policy", policy, "--json")
    assert (done.code, done.rules()) == (1, {"drift.summary"})


def test_p21_an_update_names_every_change(m: Path, made: Path, duat: Duat) -> None:
    done = duat("check", m, *QUICK, "--baseline", made, "--update-baseline", "--json", CI="true")
    assert done.json["baseline"]["status"] == "unchanged"
    metrics = json.loads(made.read_text())["metrics"]
    old = metrics.pop("summary.linear_share")
    edit(made, metrics=metrics | {"summary.dynamic_share": 7.0, "gone": 1.0})
    done = duat("check", m, *QUICK, "--baseline", made, "--update-baseline", CI="true")
    assert "summary.dynamic_share: 7 -> " in done.stdout
    assert "gone: 1 -> gone" in done.stdout
    assert f"summary.linear_share: absent -> {old:.6g}" in done.stdout
    assert duat("check", m, *QUICK, "--baseline", made).code == 0


def test_a_failing_check_does_not_become_a_baseline(tmp_path: Path, duat: Duat) -> None:
    bad.build("w_nan", tmp_path / "c")
    file = tmp_path / "b.json"
    done = duat("check", tmp_path / "c", *QUICK, "--baseline", file, "--update-baseline", "--json")
    assert (done.code, done.json["baseline"]["status"]) == (1, "not written")
    assert not file.exists()


def test_weights_alone_and_with_the_model(m: Path, made: Path, tmp_path: Path, duat: Duat) -> None:
    done = duat("check", m, "-q", "--weights-only", "--baseline", made, "--json")
    assert done.code == 0
    assert "drift.weights" in done.rules("passed")
    assert "drift.coupling" in done.rules("skipped")  # not measured is not the same as vanished
    duat("check", m, "-q", "--weights-only", "--baseline", made, "--update-baseline").refused("would drop")
    light = tmp_path / "light.json"
    assert duat("check", m, "-q", "--weights-only", "--baseline", light, "--update-baseline").code == 0
    done = duat("check", m, *QUICK, "--baseline", light, "--json")
    assert (done.code, done.rules("warned")) == (0, {"drift.new", *UNTRAINED})


def test_a_baseline_that_no_rule_looks_at(m: Path, made: Path, duat: Duat) -> None:
    duat("check", m, *QUICK, "--baseline", made, "--select", "integrity.*").refused("nothing is compared")
    assert duat("check", m, *QUICK, "--baseline", made, "--select", "drift.weights").code == 0
