"""Grouping: every value under its key, in order."""

from __future__ import annotations

from duat_cli.grouping import by_key


def test_keys_and_values_keep_their_order() -> None:
    found = by_key((len(word), word) for word in ("two", "four", "one", "five", "a"))
    assert list(found.items()) == [(3, ["two", "one"]), (4, ["four", "five"]), (1, ["a"])]


def test_nothing_has_no_groups() -> None:
    assert by_key([]) == {}
