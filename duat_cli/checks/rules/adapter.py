"""Rules about an adapter, for --adapter: one rule for each id of its linter."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Iterable
from typing import get_args

from duat_cli.checks.policy import Level
from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings


def _found(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    found = [f for f in evidence.adapter or () if LINT.get(f.rule) is settings.rule]
    # a finding that the linter itself reports as a warning only warns, even if its rule is an error
    lighter: dict[str, Level] = {"warning": "warn"} if settings.rule.level == "error" else {}
    key = (evidence.adapter_file, "")
    return [Measurement(1, f.message, where=f.where, level=lighter.get(f.level), key=key) for f in found]


def _lint() -> dict[str, Rule]:
    """The rules of configs/lint.toml, by the linter's id."""
    text = (importlib.resources.files("duat_cli.configs") / "lint.toml").read_text(encoding="utf-8")
    stated = tomllib.loads(text)
    return {
        name: Rule(
            f"adapter.{name.replace('-', '_')}", about, advice, _found, ("adapter",), level=level, unit="findings"
        )
        for level in get_args(Level)
        for name, (about, advice) in stated[level].items()
    }


LINT = _lint()
"""The linter's id -> its rule."""
LEVELS = {name: {"error": "error", "warn": "warning", "off": "note"}[rule.level] for name, rule in LINT.items()}
"""The linter's id -> its own name of the rule's level."""
RULES = list(LINT.values())
