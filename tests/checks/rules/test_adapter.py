"""The rules adapter.*."""

from __future__ import annotations

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rules.adapter import LEVELS


def test_the_adapter_rules_are_the_linter_s() -> None:
    ours = {name.removeprefix("adapter.") for name in all_rules() if name.startswith("adapter.")}
    assert ours == {"behaviour", *(name.replace("-", "_") for name in LEVELS)}  # that needs the model
    levels = [("alpha-zero", "error"), ("untouched", "warning"), ("key-dialect", "note")]
    assert [(name, LEVELS[name]) for name, _ in levels] == levels
