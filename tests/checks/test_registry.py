"""Every rule of the registry says what to do, and the default policy says what it has."""

from __future__ import annotations

from pathlib import Path

from running_checks import Duat

from duat_cli.checks.policy import read_policy
from duat_cli.checks.registry import all_rules, settings_of
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


def test_advice_to_renew_the_baseline_says_what_to_do_with_base() -> None:
    """With --base there is no baseline to write, and --update-baseline is refused."""
    renewing = [rule for rule in all_rules().values() if "--update-baseline" in rule.advice]
    assert {"drift.config", "drift.new", "drift.vanished", "behaviour.agreement"} <= {rule.id for rule in renewing}
    assert [rule.id for rule in renewing if "with --base" not in rule.advice] == []


LIGHT = ("--weights-only", "-q")


def test_layers_and_their_sources(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        'extends = "strict"\n[rules]\n"integrity.dead_neurons" = { max = 0.3 }\n'
        '"integrity.*" = "warn"\n"integrity.nonfinite" = "error"\n'
    )
    found = settings_of(read_policy(str(file)))
    neurons = found["integrity.dead_neurons"]
    assert (neurons.level, neurons.level_source) == ("warn", str(file))
    assert (neurons.max, neurons.max_source) == (0.3, str(file))
    assert found["integrity.nonfinite"].level == "error"  # named in full, though the pattern comes later
    assert found["integrity.dtype"].max_source == "policy default"
    assert found["drift.new"].level_source == "policy strict"


def test_p20_no_checks_ran(tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[rules]\n"*" = "off"\n')
    duat("check", *LIGHT, "--policy", file).refused("no checks ran")
    duat("check", *LIGHT, "--select", "drift.*").refused("no checks ran", "baseline")
    duat("check", *LIGHT, "--select", "exactness.*").refused("no checks ran")
    duat("check", *LIGHT, "--select", "nothing").refused("nothing", "no rule is named so")
    duat("check", *LIGHT, "--select", "integrity.mixed_dtypes").refused("no checks ran")


def test_select(duat: Duat) -> None:
    done = duat("check", "--select", "integrity.nonfinite", "--select", "integrity.dt*", "-q", "--json")
    assert {o["rule"] for o in done.json["outcomes"]} == {"integrity.nonfinite", "integrity.dtype"}
    assert done.json["environment"] is None  # nothing selected needs the model
