"""Every rule of the registry says what to do, and the default policy says what it has."""

from __future__ import annotations

from duat_cli.checks.policy import read_policy
from duat_cli.checks.registry import all_rules
from duat_cli.checks.rules.adapter import LINT


def test_the_default_policy_says_what_the_rules_have_anyway() -> None:
    """It teaches; were it wrong, it would change what the rules' own files say."""
    policy = read_policy("default")
    tables = policy.layers[0].content.rules
    linted = {rule.id for rule in LINT.values()}  # named as a family
    assert set(all_rules()) - linted == set(tables)
    for name, table in tables.items():
        rule = all_rules()[name]
        assert (table.level, table.max) == (rule.level, rule.max), name
        assert tuple(table.allowed or ()) == (rule.allowed or ()), name


def test_every_rule_says_what_to_do() -> None:
    for rule in all_rules().values():
        assert rule.advice.endswith("."), rule.id
        assert rule.about, rule.id
        assert "." in rule.id or rule.id == "bounds"
