"""Policies: strict about keys and values, layered, and each setting says where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_checks import Duat

from duat_cli.checks.policy import SHIPPED

LIGHT = ("--weights-only", "-q")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_densty = 0.5", ("unknown key max_densty; expected one of extends, rules, bounds, drift, pruning",)),
        ("xyzzy = 1", ("unknown key xyzzy; expected one of extends, rules, bounds, drift, pruning",)),
        ("[drift]\nxyzzy = 1", ("unknown key drift.xyzzy; expected one of dtype, tolerance",)),
        ("extend = 1", ("unknown key extend; the nearest known is 'extends'",)),
        ("[rule]\na = 1", ("unknown key rule", "'rules'")),
        ("[behaviour.loss]\nmax = 5.0", ("unknown key behaviour", 'in quotes: [rules."behaviour.loss"]')),
        ('[rules]\n"integrity.nonfinit" = "warn"', ("integrity.nonfinit", "'integrity.nonfinite'")),
        ('[rules]\n"integrity.nonfinite" = { levl = "warn" }', ("levl", "'level'")),
        ('[rules]\n"integrity.nonfinite" = "high"', ("integrity.nonfinite", "'high'")),
        ('[rules]\n"integrity.nonfinite" = { max = "high" }', ("integrity.nonfinite", "max", "number", "'high'")),
        ('[rules]\n"integrity.nonfinite" = { max = nan }', ("max", "finite")),
        ('[rules]\n"integrity.nonfinite" = { max = -1 }', ("max", "-1")),
        ('[rules]\n"integrity.nonfinite" = { max = true }', ("max", "True")),
        ('[rules]\n"integrity.nonfinite" = { allowed = ["F32"] }', ("allowed", "no list")),
        ('[rules]\n"zzz*" = "off"', ("zzz*",)),
        (
            '[rules]\n"integrity.dtype" = { allowed = ["bfloat16"] }',
            ("allowed: 'bfloat16'", "expected F64, F32, F16, BF16"),
        ),
        ('[rules]\nintegrity.files = "off"', ("rules.integrity.files", 'in quotes: [rules."integrity.files"]')),
        ("[rules]\nx = 3", ("rules.x: expected a level or a table, got '3'",)),
        ("rules = 1", ("rules: expected a table, got '1'",)),
        ('[bounds]\n"blocks.*.densty.structural" = { max = 1 }', ("densty", "'blocks.*.density.structural'")),
        ('[bounds]\n"blocks.x.density.structural" = { max = 1 }', ("blocks.x.density",)),
        ('[bounds]\n"run.seconds" = { max = 1 }', ("run.seconds",)),
        ('[bounds]\n"summary.linear_share" = {}', ("min, max or both",)),
        ('[bounds]\n"summary.linear_share" = { min = 2, max = 1 }', ("nothing could pass",)),
        ('[bounds]\n"blocks.*.density.structural" = { max = -1 }', ("never negative",)),
        ('[bounds]\n"summary.linear_share" = { max = inf }', ("max", "finite")),
        ('[bounds]\n"summary.linear_share" = { mx = 1 }', ("mx", "'max'")),
        ("[drift]\ndtyp = 1", ("dtyp", "'dtype'")),
        ('[drift]\ndtype = "float31"', ("dtype", "float31")),
        ('[drift.tolerance]\n"weights.**" = { rtl = 1 }', ("rtl", "'rtol'")),
        ('[drift.tolerance]\n"weights.**" = { rtol = -1 }', ("rtol", "-1")),
        ('[drift.tolerance]\n"weigths.**" = { rtol = 1 }', ("weigths.**", "no metric")),
        ('[drift.tolerance]\n"weights.*" = { rtol = 1 }', ("no metric", "any number: 'weights.**'")),
        ('extends = "loose"', ("extends", "loose")),
        ("extends = ", ("not TOML", "end of document")),
        ("a = 1\na = 2", ("not TOML",)),
    ],
)
def test_p19_a_wrong_policy_is_named(text: str, words: tuple[str, ...], tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "p.toml"
    file.write_text(text)
    duat("check", *LIGHT, "--policy", file).refused(str(file), *words)


def test_files_that_are_no_policy(tmp_path: Path, duat: Duat) -> None:
    for name in ("nope.toml", "nope"):
        duat("check", *LIGHT, "--policy", tmp_path / name).refused("no such file", "strict")
    duat("check", *LIGHT, "--policy", tmp_path).refused("no regular file")
    (tmp_path / "p.toml").write_bytes(b"a = '\xff'")
    duat("check", *LIGHT, "--policy", tmp_path / "p.toml").refused("UTF-8")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    duat("check", *LIGHT, "--policy", tmp_path / "pyproject.toml").refused("[tool.duat]")


def test_a_project_of_its_own(tmp_path: Path, duat: Duat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.duat.rules]\n"integrity.files" = "off"\n')
    report = duat("check", *LIGHT, "--json").json
    assert report["policy"] == ["policy default", "pyproject.toml [tool.duat]"]
    assert "integrity.files" in report["off"]
    assert duat("check", *LIGHT, "--json", "--policy", "strict").json["policy"] == ["policy default", "policy strict"]
    project.write_text('[tool.duat.ruls]\n"integrity.files" = "off"\n')
    duat("check", *LIGHT).refused("pyproject.toml [tool.duat]", "ruls", "'rules'")
    project.write_text("not TOML at all [")  # some other tool's business
    assert duat("check", *LIGHT, "--json").json["policy"] == ["policy default"]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policies_hold_for_the_demo(name: str, duat: Duat) -> None:
    done = duat("check", "--policy", name, "--prompt", "def f(x):", "-q", "--json", "--adapter", demo_adapter())
    assert done.code == 0, done.findings()
    assert f"policy {name}" in done.json["policy"]


def demo_adapter() -> Path:
    from duat_cli.loading.checkpoint.source import demo_path

    return demo_path().parent / "adapter"
