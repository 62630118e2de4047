"""`duat attribute` with nothing faked, on the bundled demo: table, JSON, and every way to ask for what is not there."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.report.tables.attribute.report import render_attribute
from duat_cli.report.tables.page import Page
from duat_cli.results.attribute import AttributeReport

PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> AttributeReport:
    file = tmp_path_factory.mktemp("attribute") / "report.json"
    words = ["--prompt", PROMPT, "--target", " the", "--against", " a", "--top", "6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "calm", lambda talk: None)
        assert run(["attribute", *words, "-o", str(file), "-q"]) == 0
    return AttributeReport.model_validate_json(file.read_text(encoding="utf-8"))


def test_the_demos_parts_add_up(report: AttributeReport) -> None:
    (one,) = report.attribution
    p = one.parts
    whole = math.fsum([*(t.value for t in p.tokens), p.static.value, *(u.value for u in p.units), p.head_bias])
    assert whole == pytest.approx(one.logit, abs=1e-4)
    assert report.certificate.exact
    assert report.certificate.residual < 1e-5
    assert one.target.token is not None
    assert one.target.against is not None
    assert (one.target.token.text, one.target.against.text) == (" the", " a")
    assert report.model.heads > 0
    assert len(p.neurons) == len(one.flows) == 6


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("boxes", [True, False])
def test_the_table_fits_and_shows_what_leads(report: AttributeReport, width: int, boxes: bool) -> None:
    text = render_attribute(report, Page(width=width, boxes=boxes))
    assert max(map(cell_len, text.splitlines())) <= width
    assert text.isascii() is not boxes
    one = report.attribution[0]
    for part in ("' the' against ' a' at position 10", "Leading blocks", "Leading heads", "Leading neurons", "exact:"):
        assert part in text
    assert "do not say what would happen if a part were removed" in " ".join(text.split())
    neuron = one.parts.neurons[0]
    assert f"{neuron.block}.{neuron.index} " in text
    bars = {line.split("'")[1].strip(): line for line in text.splitlines() if "' " in line and "|" in line}
    here = {t.text.strip(): t.value + sum((u.tokens or [])[t.position] for u in one.parts.units)
            for t in one.parts.tokens}  # fmt: skip
    largest = max(here, key=lambda text: abs(here[text]))
    mark = "█" if boxes else "#"
    assert max(bars, key=lambda text: bars[text].count(mark)) == largest
    left, _, right = bars[largest].partition("|")
    assert (mark in right) is (here[largest] > 0)
    assert (mark in left) is (here[largest] < 0)


def test_every_position_is_one_line_each(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attribute", str(short / "demo"), "--prompt", PROMPT, "--position", "all", "-q"]) == 0
    text = capsys.readouterr().out
    assert "11 predictions" in text
    assert max(map(cell_len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if line[:1].isdigit() and "'" in line]
    assert [row.split()[0] for row in rows] == [str(place) for place in range(11)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", " Paris and Rome"], "tokens, "),
        (["--position", "11"], "--position 11: the prompt has 11 tokens; expected -11 to 10"),
        (["--position", "last"], "--position 'last': expected a whole number, such as -1, or all"),
        (["--target", ""], "--target: an empty text is no token"),
        (["--target", " the", "--against", " the"], "--against ' the': that is the target itself\n"),
        (["--first-token"], "--first-token: there is no text whose first token it could take; give --target or"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    words: list[str], message: str, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["attribute", str(short / "demo"), "--prompt", PROMPT, "-q", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


def test_the_first_token_of_a_longer_target(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", PROMPT, "-q", "--json", "--target", " Paris", "--first-token"]
    assert run(["attribute", str(short / "demo"), *words]) == 0
    (one,) = document(capsys)["attribution"]
    assert one["target"]["given"] is True
    assert " Paris".startswith(one["target"]["token"]["text"])


def test_many_prompts_from_a_file(short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("One two\nThree\n", encoding="utf-8")
    assert run(["attribute", str(short / "demo"), "--prompts", str(tmp_path / "p.txt"), "-q", "--json"]) == 0
    assert [one["prompt"] for one in document(capsys)["attribution"]] == [0, 1]


def test_targets_from_a_field_of_the_file(short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"text": "One two", "answer": " the"}\n\n{"text": "Three", "answer": " a"}\n', encoding="utf-8")
    words = ["attribute", str(short / "demo"), "--prompts", str(file), "-q", "--json", "--target-field"]
    assert run([*words, "answer"]) == 0
    assert [one["target"]["token"]["text"] for one in document(capsys)["attribution"]] == [" the", " a"]
    assert run([*words, "gold"]) == 2
    assert "p.jsonl line 1" in capsys.readouterr().err
    file.write_text(
        '{"text": "One two", "answer": " the"}\n{"text": "Three", "answer": " the the"}\n', encoding="utf-8"
    )
    assert run([*words, "answer"]) == 2
    assert "--target-field answer, line 2: ' the the': 2 tokens" in capsys.readouterr().err
    file.write_text('{"text": "One two", "answer": "\\ud800"}\n', encoding="utf-8")
    assert run([*words, "answer"]) == 2
    assert "p.jsonl line 1, 'answer': character 1 has no UTF-8 form" in capsys.readouterr().err


def test_a_long_token_is_cut_where_it_is_named(short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary may hold a token of any length."""
    folder = tmp_path / "model"
    shutil.copytree(short / "demo", folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    held, long = json.loads(text), "Long" * 700
    name, number = next((n, k) for n, k in held["model"]["vocab"].items() if k == 1900)
    held["model"]["vocab"] = {long if n == name else n: k for n, k in held["model"]["vocab"].items()}
    held["model"]["merges"] = [pair for pair in held["model"]["merges"] if name not in (*pair, "".join(pair))]
    (folder / "tokenizer.json").write_text(json.dumps(held), encoding="utf-8")
    assert run(["attribute", str(folder), "--prompt", PROMPT, "--target", f"#{number}", "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(f"{long[:38]}.." in line for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "2", "--continuation", " a"], "--steps: says by itself what is attributed; leave out --continu"),
        (["--steps", "2", "--position", "1"], "--steps: says by itself what is attributed; leave out --position"),
        (["--continuation", " a", "--target", " a", "--against", " b"], "leave out --target and --against"),
        (["--steps", "2", "--measure", "2"], "--measure: one position at a time; leave out --measure, or --steps"),
        (["--target-field", "x"], "--target-field: is of a file of JSON lines; give --prompts FILE, and no --prompt"),
        (["--against", "a", "--against-field", "x"], "--against and --against-field: give one of them"),
        (["--measure", "2", "--position", "all"], "--measure: one position at a time"),
    ],
)
def test_options_that_contradict_each_other(
    words: list[str], message: str, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["attribute", str(short / "demo"), "--prompt", PROMPT, "-q", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_continuation_marks_the_tokens_that_made_it(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attribute", str(short / "demo"), "--prompt", PROMPT, "-q", "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert "continued by '" in text
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "[ is]" in text


def test_the_map_has_the_largest_part_at_its_place(report: AttributeReport) -> None:
    text = render_attribute(report, Page(width=80))
    lines = text.splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("Where it is formed"))
    (one,) = report.attribution
    values = {("x_0", t.position): t.value for t in one.parts.tokens}
    values |= {(str(u.block), t): v for u in one.parts.units for t, v in enumerate(u.tokens or [])}
    place = max(values, key=lambda key: abs(values[key]))
    columns = lines[start + 1].split()
    rows = {line.split()[0]: line.split()[1:] for line in lines[start + 2 : start + 9]}
    assert list(rows) == ["x_0", *map(str, range(6))]
    for (row, token), value in values.items():
        digit = round(9 * value / abs(values[place]))
        assert rows[row][columns.index(str(token))] == (f"{digit:+d}" if digit else ".")
    assert rows[place[0]][columns.index(str(place[1]))] in ("+9", "-9")
