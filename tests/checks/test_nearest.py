"""Only a key that is close is suggested."""

from __future__ import annotations

from duat_cli.checks.nearest import nearest, suggestion
from duat_cli.checks.registry import all_rules


def test_only_a_similar_key_is_suggested() -> None:
    assert nearest("xyzzy", all_rules()) == nearest("xyzzy", []) == ""
    assert nearest("Integrity.Nonfinit", all_rules()) == "integrity.nonfinite"
    assert suggestion("xyzzy", all_rules()) == ""
