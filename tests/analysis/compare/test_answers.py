"""Which tokens `--patch` follows, and how it is asked for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attributing import WORDS

from duat_cli.analysis.compare.answers import Asked, tokens_of
from duat_cli.analysis.compare.request import Texts, texts_of
from duat_cli.errors import InputError

THREE = texts_of(["x", "y", "z"], None, None, None, None)


def of_file(tmp_path: Path, *more: dict[str, str]) -> tuple[Texts, str]:
    """Pairs, each with more fields."""
    file = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"a": "x", "b": "y"} | fields) for fields in more]
    file.write_text("\n\n".join(lines), encoding="utf-8")
    return texts_of(None, str(file), None, None, None), str(file)


def test_one_target_is_that_of_all_pairs() -> None:
    answers = Asked("t50", "#60").of(THREE, None, patched=True)
    assert answers is not None
    assert tokens_of(answers, WORDS) == [(60, 50)] * 2
    assert Asked().of(THREE, None, patched=True) is None


def test_every_pair_of_a_file_has_its_own(tmp_path: Path) -> None:
    pairs = [{"right": "t50", "wrong": "t60"}, {"wrong": "t51", "right": "t61"}]
    answers = Asked(target_field="right", against_field="wrong").of(*of_file(tmp_path, *pairs), patched=True)
    assert answers is not None
    assert tokens_of(answers, WORDS) == [(60, 50), (51, 61)]
    mixed = Asked("t70", against_field="wrong").of(*of_file(tmp_path, *pairs), patched=True)
    assert mixed is not None
    assert tokens_of(mixed, WORDS) == [(60, 70), (51, 70)]


@pytest.mark.parametrize(
    ("target", "against", "said"),
    [
        ("t50 t51", "t60", r"--target-field right, line 3: 't50 t51': 2 tokens, .*; expected one: give one by its id$"),
        ("t50", "t50", "--against-field wrong, line 3: 't50': that is the target itself; name another"),
    ],
)
def test_a_line_that_names_no_two_tokens(target: str, against: str, said: str, tmp_path: Path) -> None:
    pairs = [{"right": "t50", "wrong": "t60"}, {"right": target, "wrong": against}]
    answers = Asked(target_field="right", against_field="wrong").of(*of_file(tmp_path, *pairs), patched=True)
    assert answers is not None
    with pytest.raises(InputError, match=said):
        tokens_of(answers, WORDS)


@pytest.mark.parametrize(
    ("asked", "patched", "said"),
    [
        ({"target": "t50"}, True, "--against: not given; --patch follows the logit of one token or class less another"),
        (
            {"against_field": "wrong"},
            True,
            "--against-field: is of a file of JSON lines; give --prompts FILE, and no --prompt",
        ),
        ({"target": "t50", "against": "t60"}, False, "--target: the token whose logit --patch follows; give --patch"),
        ({"target": "t50", "target_field": "right"}, True, "--target and --target-field: give one of them"),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, Any], patched: bool, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Asked(**asked).of(THREE, None, patched=patched)


def test_a_line_without_the_field_is_named(tmp_path: Path) -> None:
    texts, file = of_file(tmp_path, {"right": "t50"})
    with pytest.raises(InputError, match="line 1: no string under 'wrong', which --against-field names"):
        Asked("t50", against_field="wrong").of(texts, file, patched=True)
