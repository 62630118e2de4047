"""A section of a model card: golden text, read back by huggingface_hub, and its command run again.

After a wanted change: `PYTHONPATH=tests/report python tests/report/forms/test_model_card.py` rewrites the golden files;
read their diff.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import sample_reports as sample
from huggingface_hub import ModelCard

import duat_cli as duat
from duat_cli.cli.main import run
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.report.forms.model_card import model_card, undecided_model_card

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "card_check.md": lambda: model_card(sample.check_report()),
    "card_check_sound.md": lambda: model_card(sample.check_report(sound=True)),
    "card_inspect.md": lambda: model_card(sample.inspect_report()),
}
TEXTS = ["def main(argv):", "Return the number of items."]


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    assert CASES[name]() == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_card_with_the_section_is_read_as_it_was(make: Any) -> None:
    """Behind a card's own metadata and text: neither is changed by it."""
    before = ModelCard("---\nlicense: mit\ntags:\n- a\n---\n# A model\n")
    after = ModelCard(f"{before.content}\n{make()}")
    assert after.data.to_dict() == before.data.to_dict()
    assert after.text.startswith(before.text.rstrip())
    assert after.text.count("\n## ") == 1


def test_foreign_strings_do_nothing() -> None:
    name = "m`\n```\n## x [y](https://evil.example) <b> | $(id) 'q'\x1b[2J\u202e"
    for text in (model_card(sample.check_report(name=name)), undecided_model_card(sample.undecided_report(name=name))):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
        prose = re.sub(r"^```bash$.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"<b>|\]\(|://", prose)
        assert text.count("\n## ") == 0
        assert len(re.findall(r"^```", text, re.MULTILINE)) in (0, 2)


def test_another_report_has_none() -> None:
    with pytest.raises(InputError, match="only of a report of 'duat check' or 'duat inspect'"):
        model_card(sample.verify_report())


def numbers_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", text, re.MULTILINE))


def test_its_numbers_are_those_of_the_report() -> None:
    report = duat.check(demo_path(), prompts=TEXTS)
    rows = numbers_of(report.to_model_card())
    assert report.behaviour is not None
    assert report.certificate is not None
    assert report.behaviour.uniform is not None
    assert rows["Loss on the prompts"].startswith(f"{report.behaviour.loss_per_token:.3f} nats per token")
    assert f"uniform {report.behaviour.uniform:.3f}" in rows["Loss on the prompts"]
    assert f"exact: the DUAT sum is {report.certificate.relative_error:.1e} from" in rows["Certificate"]
    size = (demo_path() / "model.safetensors").stat().st_size
    assert rows["Size"] == f"{size:,} bytes in 1 file"
    assert rows["Verdict"] == f"**PASSED: {report.counts.passed} passed, {report.counts.skipped} skipped**"


@pytest.mark.parametrize("policy", ["default", "strict", "own"])
def test_its_command_gives_the_report_again(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text('[rules]\n"integrity.dtype" = "warn"\n')
    given = {"default": "default", "strict": "strict", "own": "my.toml"}[policy]
    report = duat.check(demo_path(), policy=given, weights_only=True)
    [line] = re.findall(r"^duat (.+)$", report.to_model_card(), re.MULTILINE)
    capsys.readouterr()
    assert run([*shlex.split(line), "--json", "-q"]) == 0
    again = json.loads(capsys.readouterr().out)
    before = json.loads(report.to_json())
    assert {k: v for k, v in again.items() if k != "run"} == {k: v for k, v in before.items() if k != "run"}


def test_rules_that_did_not_run_are_counted() -> None:
    report = duat.check(demo_path(), weights_only=True, select=["integrity.dtype"])
    assert (
        numbers_of(report.to_model_card())["Policy"]
        == f"default; {len(report.off)} rules turned off, by it or by --select"
    )


def test_the_command_of_inspect_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["inspect", str(demo_path()), "--prompt", TEXTS[0], "--null", "uniform"]
    assert run([*words, "--format", "model-card", "-o", "card.md", "-q"]) == 0
    report = duat.inspect(demo_path(), prompts=TEXTS[0], null="uniform")
    assert (tmp_path / "card.md").read_text() == report.to_model_card()
    assert run([*words, "--format", "model-card", "--json"]) == 2


def test_of_some_blocks_it_names_them_and_the_block_whose_output_it_splits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--prompt", TEXTS[0], "--null", "uniform", "--format", "model-card", "-q"]
    assert run(["inspect", str(demo_path()), "--layers", "1,3", *words]) == 0
    card = capsys.readouterr().out
    rows = numbers_of(card)
    terms = duat.inspect(demo_path(), prompts=TEXTS[0], null="uniform").blocks[3].terms
    assert terms is not None
    assert rows["Blocks of this report"] == "1,3"
    assert rows["What block 3's output is made of"].startswith(f"linear {terms.linear.share:.3f}, ")
    [line] = re.findall(r"^duat (.+)$", card, re.MULTILINE)
    assert run([*shlex.split(line), *words]) == 0
    assert capsys.readouterr().out == card


def test_a_saved_report_gives_the_same_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text(duat.check(demo_path(), weights_only=True).to_json())
    Path("u.json").write_text(sample.verify_report().model_dump_json())
    capsys.readouterr()
    assert run(["report", "c.json", "--format", "model-card", "-q"]) == 0
    assert numbers_of(capsys.readouterr().out)["Verdict"].startswith("**PASSED")
    assert run(["report", "u.json", "--format", "model-card"]) == 2
    assert "a report of duat verify, which has no model card; model cards: check, inspect" in capsys.readouterr().err
    assert run(["report", "c.json", "c.json", "--format", "model-card"]) == 2
    assert "a section is of one report" in capsys.readouterr().err


if __name__ == "__main__":
    for file, make in CASES.items():
        (GOLDEN / file).write_text(make(), encoding="utf-8")
