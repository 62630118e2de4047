"""The tables of the comparison of criteria, the text that it reads, and its section of the page."""

from __future__ import annotations

import json
import math
import platform

import pytest
import torch
from benchmarks.criteria.comparison import OURS, REPAIRED, Comparison, Outcome
from benchmarks.criteria.judging import Judged
from benchmarks.criteria.part import TITLE, with_section
from benchmarks.criteria.table import ALWAYS, contests, label, lost, markdown
from benchmarks.criteria.texts import library, texts_of

from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.tokenizer import load_tokenizer

WAVE = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(10)  # of mean 0, over 20 windows


def outcome(
    method: str, damage: float, spread: float = 0.0, wanted: float = 0.1, variant: str = "", *, means: bool = False
) -> Outcome:
    judged = Judged(damage + spread * WAVE, torch.full((20,), math.log(30 + damage), dtype=torch.float64))
    return Outcome(method, variant, wanted, wanted, judged, means)


@pytest.fixture
def found() -> Comparison:
    """Two uses of one method; another that differs from duat by noise alone; with means; and duat's repair."""
    one = Comparison("a model", outcome("", 0.0).judged, (4, 20))
    one.parts += [outcome("first", 0.9, variant="as published"), outcome("first", 0.5, variant="one order")]
    one.parts += [outcome(OURS, 0.4), outcome("second", 0.41, 0.2)]
    one.parts += [outcome("first", 0.45, means=True), outcome(OURS, 0.3, means=True)]
    one.parts += [outcome(REPAIRED, 0.1, means=True)]
    one.blocks += [outcome("ShortGPT", 0.3, wanted=1), outcome(OURS, 2.0, wanted=1)]
    return one


def test_the_best_use_is_shown_and_what_the_best_does_not_beat_is_bold(found: Comparison) -> None:
    lines = markdown(found).splitlines()
    assert "| first | 0.5, 30.5 (1.25 to 1.25) | - | - | - |" in lines
    [second] = [line for line in lines if line.startswith("| second |")]
    assert second.startswith("| second | **0.41**, 30.4 (0.")
    assert "| duat | **0.4**, 30.4 | - | - | - |" in lines
    assert "| first | 0.45, 30.4 (1.50 to 1.50) | - | - | - |" in lines  # with means
    assert "| duat | **0.3**, 30.3 | - | - | - |" in lines
    assert "| duat, repaired | 0.1, 30.1 (0.33 to 0.33) | - | - | - |" in lines  # it is in no contest
    assert "| ShortGPT | **0.3**, 30.3 | - | - |" in lines
    assert "| duat | 2.00, 32.0 (6.67 to 6.67) | - | - |" in lines
    assert "Perplexity of the whole model there: 30.00." in lines


def test_where_another_method_does_less_damage(found: Comparison) -> None:
    assert lost([found]) == "Another method does less damage than duat here: a model without 1 blocks (6.67 to 6.67)."
    found.blocks.clear()
    assert lost([found]) == ALWAYS


def test_ratios_are_to_the_best_other_method(found: Comparison) -> None:
    [zeros], [means], [anything], [repaired] = contests(found).values()
    assert (zeros.value, label(zeros.other)) == (pytest.approx(0.4 / 0.41), "second")
    assert zeros.low < zeros.value < zeros.high
    assert zeros.low < 1 < zeros.high
    assert (means.value, label(means.other)) == (pytest.approx(0.3 / 0.45), "first with means")
    assert (anything.value, label(anything.other)) == (pytest.approx(0.3 / 0.41), "second")
    assert (repaired.value, label(repaired.other)) == (pytest.approx(0.1 / 0.41), "second")
    assert repaired.high < 0.5


def test_the_section_takes_the_place_of_its_own() -> None:
    page = f"# Page\n\ntext\n\n{TITLE}\n\nold\n\n## Next\n\nmore\n"
    text = f"{TITLE}\n\nnew\n"
    assert with_section(page, TITLE, text) == f"# Page\n\ntext\n\n{TITLE}\n\nnew\n\n## Next\n\nmore\n"
    assert with_section(with_section("# Page\n", TITLE, text), TITLE, text) == f"# Page\n\n{TITLE}\n\nnew\n"


def test_windows_of_two_sides_come_from_different_texts() -> None:
    tokenizer = load_tokenizer(demo_path())
    found = texts_of(tokenizer, ["one " * 9000, "two " * 9000])
    assert (found.calibration.shape, found.held_out.shape) == ((32, 128), (64, 128))
    assert bool((found.calibration[:, 0] == tokenizer.bos_token_id).all())
    assert set(tokenizer.decode(found.calibration.flatten(), skip_special_tokens=True).split()) == {"one"}
    assert "one" not in tokenizer.decode(found.held_out.flatten(), skip_special_tokens=True)
    with pytest.raises(ValueError, match="the text is too short"):
        texts_of(tokenizer, ["one " * 9000, "two"])


def test_the_library_s_files_are_those_that_training_held_out() -> None:
    """As many as training counted, in the Python that it ran in; in another one, about as many."""
    texts = library()
    made = json.loads((demo_path().parent / "training.json").read_text(encoding="utf-8"))
    counted, other = (
        made["base"]["corpus"]["held_out"]["files"],
        platform.python_version() != made["versions"]["python"],
    )
    assert abs(len(texts) - counted) <= (15 if other else 0)
    assert all(text == text.strip() and text for text in texts)
