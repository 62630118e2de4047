"""The rules adapter.*."""

from __future__ import annotations

from duat_cli.checks.registry import all_rules


def test_the_adapter_rules_are_the_linter_s() -> None:
    from duat_cli.analysis.lora.lint import LEVELS

    levels = {"error": "error", "warning": "warn", "note": "off"}
    ours = {name.removeprefix("adapter."): r.level for name, r in all_rules().items() if name.startswith("adapter.")}
    assert ours.pop("behaviour")  # needs the model, which the linter does not load
    assert ours == {name.replace("-", "_"): levels[level] for name, level in LEVELS.items()}
