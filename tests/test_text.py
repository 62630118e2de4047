"""Foreign strings as text: what steers a terminal, or hides in it, is escaped."""

from __future__ import annotations

from pathlib import Path

import pytest

from duat_cli.text import (
    about,
    apart,
    clean,
    expanded,
    first_of,
    in_one,
    indices,
    natural,
    one_line,
    plural,
    some,
    spans,
)


def test_clean_escapes_what_steers_or_hides() -> None:
    assert clean("a\x00\x1b[31m\x7f\x9b\u202e\u2028\u200b\ud800\n") == (
        "a\\x00\\x1b[31m\\x7f\\x9b\\u202e\\u2028\\u200b\\ud800\\n"
    )
    assert clean("é 中文 ✓ [bold] \\") == "é 中文 ✓ [bold] \\"


def test_one_line() -> None:
    assert one_line("a\n  b\t\x1bc") == "a b \\x1bc"
    assert one_line("x" * 500 + "end", 20) == "x" * 9 + " ... " + "xxxend"


def test_apart_takes_the_digits_that_tell_numbers_apart() -> None:
    assert (apart(6.00937, 6.56838), apart(5.397123e-07), apart(0.0)) == ("6.009", "5.397e-07", "0")
    assert (apart(0.2218521, 0.2218534), apart(0.2218534, 0.2218521)) == ("0.221852", "0.221853")
    assert (apart(0.5, 0.5), apart(1 / 3, 1 / 3)) == ("0.5", "0.3333")
    assert apart(float("nan"), float("inf")) == "nan"


def test_spans() -> None:
    assert spans([]) == []
    assert spans([7, 2, 0, 1, 4, 2]) == ["0-2", "4", "7"]


def test_indices() -> None:
    assert indices("block", [3]) == "block 3"
    assert indices("block", [7, 0, 1, 2, 4]) == "blocks 0-2, 4, 7"


@pytest.mark.parametrize(
    ("texts", "one"),
    [
        (["leaves 2.0e-01", "leaves 3.0e-02", "leaves 1.5e-01"], "leaves 3.0e-02 to 2.0e-01"),
        (["the same", "the same"], "the same"),
        (["leaves 2.0e-01 of 5.0e-01", "leaves 3.0e-02 of 4.0e-01"], None),
        (["needs transformers 5.1", "needs transformers 5.2"], None),
        (["leaves 2.0e-01", "keeps 2.0e-01"], None),
        (["token 3 is NaN", "token 4 is NaN"], None),  # a count or a name is no measured number
        (["h.1.0e-01 is", "h.2.0e-01 is"], None),
        (["leaves 2.0e-01", "leaves 2.0e-01 and 1.0e+00"], None),
    ],
)
def test_in_one(texts: list[str], one: str | None) -> None:
    assert in_one(texts) == one


def test_a_home_that_nobody_has_stays_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/one")
    assert expanded("~/models") == Path("/home/of/one/models")
    assert expanded("~nobody_at_all/x") == Path("~nobody_at_all/x")
    assert expanded("./~/x") == Path("~/x")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "about 1 s"), (7.4, "about 7 s"), (44, "about 40 s"), (61, "about 1 min"), (230, "about 4 min"),
        (1600, "about 25 min"), (3300, "about 1 h"), (5400, "about 1.5 h"), (80_000, "about 22 h"),
    ],
)  # fmt: skip
def test_about(seconds: float, said: str) -> None:
    assert about(seconds) == said


def test_one_is_no_plural() -> None:
    assert [plural(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_of_many_some_and_a_count() -> None:
    assert some(["a", "b"], 2) == "a, b"
    assert some(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert some(["a", "b", "c"], 1, "; ", "; and ") == "a; and 2 more"
    assert some([], 2) == ""
    assert first_of(["a", "b"], 2) == ["a", "b"]
    assert first_of(["a", "b", "c", "d"], 2, "more, see --json") == ["a", "b", "and 2 more, see --json"]


def test_names_sort_by_number() -> None:
    assert sorted(["b.10.x", "b.2.x", "b.x", "a"], key=natural) == ["a", "b.2.x", "b.10.x", "b.x"]
