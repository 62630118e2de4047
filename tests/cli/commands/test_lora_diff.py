"""`duat lora-diff` with nothing faked: the bundled adapter, bad files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bad_checkpoints
import pytest

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path
from duat_cli.results.lora import LoraReport


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture
def few(short: Path) -> list[str]:
    """The first blocks of the demo and of its adapter."""
    return [str(short / "demo"), str(short / "adapter")]


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.fixture
def case(tmp_path: Path) -> Any:
    def make(name: str) -> tuple[str, str, bad_checkpoints.Case]:
        found = bad_checkpoints.build(name, tmp_path / name)
        return str(tmp_path / name / found.inputs["model"]), str(tmp_path / name / found.inputs["adapter"]), found

    return make


@pytest.mark.parametrize("name", ["good_lora", "lora_shape_mismatch", "lora_nan", "lora_malicious_pickle"])
@pytest.mark.parametrize("lint", [False, True])
def test_the_cases(name: str, lint: bool, case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, adapter, expected = case(name)
    capsys.readouterr()  # the progress bar of saving
    code = run(["lora-diff", model, adapter, "--json", "-q", *(["--lint"] if lint else [])])
    out, err = capsys.readouterr()
    assert not list(tmp_path.rglob("PWNED"))
    if name == "lora_malicious_pickle" or (expected.kind == "error" and not lint):
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert expected.matches(err)
        return
    report = LoraReport.model_validate(json.loads(out, parse_constant=pytest.fail))
    assert err == ""
    if lint:
        assert code == (1 if name != "good_lora" else 0)
        assert bool(report.lint) == (name != "good_lora")
        assert all(f.level == "error" for f in report.lint)
        return
    assert code == 0
    if expected.kind == "warn":
        assert any(expected.matches(f"warn {warning}") for warning in report.warnings)
        assert any(m.frobenius_norm is None and "NaN" in m.reasons["frobenius_norm"] for m in report.modules)
        assert report.summary.frobenius_norm is report.summary.relative_frobenius is None
    else:
        assert report.warnings == []
        assert len(report.modules) == 2


def test_the_bundled_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora-diff", "--json"]) == 0
    out, err = capsys.readouterr()
    report = LoraReport.model_validate(json.loads(out))
    assert "bundled demo model and its adapter" in err
    assert len(report.modules) == 24
    assert {m.rank for m in report.modules} == {4}
    assert report.lint == []
    assert run(["lora-diff", str(demo_path()), str(demo_adapter_path()), "--json", "-q"]) == 0
    again = document(capsys)
    for name in ("modules", "summary", "lint"):
        assert again[name] == json.loads(out)[name]


@pytest.mark.parametrize("width", ["60", "120"])
def test_the_table_keeps_to_the_page(
    width: str, few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for more in ((), (few[1],), ("--lint",), ("--no-base",)):
        assert run(["lora-diff", *few, *more, "-q"]) == 0
        page = capsys.readouterr().out
        assert max(map(len, page.split("\n"))) <= int(width)


def test_all_lists_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora-diff", "-q"]) == 0
    summed = capsys.readouterr().out
    assert "24 parameters in 4 kinds; --all shows a row for each parameter." in summed
    assert "model.layers.3" not in summed
    assert run(["lora-diff", "-q", "--all"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("model.layers.3.") == 4
    assert "shows a row for each" not in listed


def test_an_adapter_with_itself_agrees(few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora-diff", *few, few[1], "--json", "-q"]) == 0
    report = document(capsys)
    assert report["comparison"]["cosine"] == pytest.approx(1.0)
    assert len(report["comparison"]["agreeing"]) == 8


def test_a_checkpoint_with_itself_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora-diff", str(demo_path()), str(demo_path()), "--json", "-q"]) == 0
    report = document(capsys)
    assert (report["modules"], report["summary"]["frobenius_norm"]) == ([], None)
    assert run(["lora-diff", str(demo_path()), str(demo_path()), "-q"]) == 0
    assert "none of 56 parameters changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{demo}",), "TUNED missing"),
        (("{demo}", "./nope"), "no such folder"),
        (("./nope", "{adapter}"), "no such folder"),
        (("{adapter}", "{adapter}"), "holds an adapter"),
        (("{adapter}", "{demo}"), "give the base model's folder (the order is BASE ADAPTER)"),
        (("{demo}", "{demo}", "{adapter}"), "is a checkpoint"),
        (("{demo}", "{demo}", "--lint"), "is a checkpoint"),
        (("{demo}", "{empty}"), "adapter_config.json"),
        (("{demo}", "{prefix}"), "peft_type: 'PREFIX_TUNING' is not supported"),
        (("{demo}", "{prefix}"), "where PEFT can merge it (merge_and_unload)"),
        (("{demo}", "{arrow}"), "arrow_config: Arrow routing is not supported"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (
        ("prefix", {"peft_type": "PREFIX_TUNING"}),
        ("arrow", {"peft_type": "LORA", "arrow_config": {"k": 1}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "empty").mkdir()
    places = {name: tmp_path / name for name in ("empty", "prefix", "arrow")}
    filled = [a.format(demo=demo_path(), adapter=demo_adapter_path(), **places) for a in arguments]
    assert run(["lora-diff", *filled, "-q"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


# -- with prompts --------------------------------------------------------------------------------------------


def test_prompts(few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora-diff", *few, "--prompt", "def main(argv):", "--prompt", "A list is", "--json", "-q"]) == 0
    report = LoraReport.model_validate(document(capsys))
    assert (report.level, len(report.prompts or []), len(report.blocks or [])) == ("prompts", 2, 2)
    assert report.certificate is not None
    assert report.certificate.exact
    assert report.eq18 is not None
    assert report.eq18.holds
    assert len(report.eq18.on_third) == 2
    assert all(m.sup_local is not None for m in report.modules if m.name.endswith(("q_proj", "v_proj")))
    assert run(["lora-diff", *few, "--prompt", "def main(argv):", "-q", "--max-tokens", "3"]) == 0
    page = capsys.readouterr().out
    assert "routing" in page
    assert max(map(len, page.split("\n"))) <= 80


def test_a_tuned_model_that_is_not_exact_is_exit_1(
    few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("duat_cli.analysis.session.tolerance_for", lambda dtype: 1e-12)
    assert run(["lora-diff", *few, "--prompt", "def main(argv):", "-q"]) == 1
    assert " ".join(capsys.readouterr().out.split()).count("NOT EXACT") == 2


def test_the_bundled_adapter_acts_most_on_its_own_kind_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was tuned on the language reference: there it moves the model more, and to the better."""
    from pydoc_data.topics import topics

    own = [
        " ".join(topics[name].split())[:400]
        for name in ("with", "try", "lambda", "operator-summary", "attribute-access")
    ]
    others = [
        "The old fisherman walked along the beach at dawn, thinking of his daughter, who had left for the city.",
        "Quarterly revenue rose four percent to two billion dollars, as stronger sales in Europe offset a weak dollar.",
        "Whisk the eggs with the sugar until pale, then fold in the flour and the melted butter, and bake for an hour.",
        "import os\nimport sys\n\ndef main(argv):\n    for name in argv[1:]:\n        print(os.path.getsize(name))\n",
        "class Stack:\n    def __init__(self):\n        self.all = []\n\n    def pop(self):\n        return self.all\n",
    ]
    found = []
    for name, texts in (("own", own), ("others", others)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        assert run(["lora-diff", "--prompts", str(file), "--max-tokens", "32", "--json", "-q"]) == 0
        found.append(LoraReport.model_validate(document(capsys)).summary)
    mine, theirs = found
    assert mine.kl is not None
    assert theirs.kl is not None
    assert mine.kl > 1.2 * theirs.kl
    assert mine.loss_change is not None
    assert theirs.loss_change is not None
    assert mine.loss_change < -0.2
    assert theirs.loss_change > -0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "a", "--lint"), "--lint: runs no model, and prompts run both: leave out --lint, or the prompts"),
        (("--prompt", "a", "--no-base"), "leave out --no-base, or the prompts"),
        (("a", "b", "c", "--prompt", "a"), "OTHER 'c': prompts run one adapter against its base: give 'b' and 'c' one"),
        (("--prompt", "a", "--default-prompts"), "give either"),
        (("--max-tokens", "3"), "there are no prompts"),
        (("--prompt", " "), "empty prompt"),
        (("--prompts", "missing.txt"), "cannot be read"),
    ],
)
def test_bad_prompts_are_one_line(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora-diff", *arguments, "-q"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
