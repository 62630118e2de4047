"""Policies: strict about keys and values, layered, and each setting says where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running_checks import Duat

import bad_checkpoints as bad  # isort: skip

from duat_cli.checks.nearest import nearest, suggestion
from duat_cli.checks.paths import asks_for, is_known, known_paths, leaves_out, matches, may_be_negative
from duat_cli.checks.policy import SHIPPED, read_policy
from duat_cli.checks.registry import all_rules
from duat_cli.checks.settings import settings_of
from duat_cli.errors import InputError

LIGHT = ("--weights-only", "-q")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_densty = 0.5", ("unknown key max_densty; expected one of extends, rules, bounds, drift, pruning",)),
        ("xyzzy = 1", ("unknown key xyzzy; expected one of extends, rules, bounds, drift, pruning",)),
        ("[drift]\nxyzzy = 1", ("unknown key drift.xyzzy; expected one of dtype, tolerance",)),
        ("extend = 1", ("unknown key extend; the nearest known is 'extends'",)),
        ("[rule]\na = 1", ("unknown key rule", "'rules'")),
        ('[rules]\n"integrity.nonfinit" = "warn"', ("integrity.nonfinit", "'integrity.nonfinite'")),
        ('[rules]\n"integrity.nonfinite" = { levl = "warn" }', ("levl", "'level'")),
        ('[rules]\n"integrity.nonfinite" = "high"', ("integrity.nonfinite", "'high'")),
        ('[rules]\n"integrity.nonfinite" = { max = "high" }', ("integrity.nonfinite", "max", "number", "'high'")),
        ('[rules]\n"integrity.nonfinite" = { max = nan }', ("max", "finite")),
        ('[rules]\n"integrity.nonfinite" = { max = -1 }', ("max", "-1")),
        ('[rules]\n"integrity.nonfinite" = { max = true }', ("max", "True")),
        ('[rules]\n"integrity.nonfinite" = { allowed = ["F32"] }', ("allowed", "no list")),
        ('[rules]\n"zzz*" = "off"', ("zzz*",)),
        ("[rules]\nx = 3", ("rules.x",)),
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


def test_the_default_policy_says_what_the_rules_have_anyway() -> None:
    """It teaches; were it wrong, it would change what the rules' own files say."""
    policy = read_policy("default")
    tables = policy.layers[0].content.rules
    assert {name for name in all_rules() if not name.startswith("adapter.")} == set(tables)
    for name, table in tables.items():
        rule = all_rules()[name]
        assert (table.level, table.max) == (rule.level, rule.max), name
        assert tuple(table.allowed or ()) == (rule.allowed or ()), name


def test_every_rule_says_what_to_do() -> None:
    for rule in all_rules().values():
        assert rule.advice.endswith("."), rule.id
        assert rule.about, rule.id
        assert "." in rule.id or rule.id == "bounds"


def test_the_adapter_rules_are_the_linter_s() -> None:
    from duat_cli.analysis.lora.lint import LEVELS

    levels = {"error": "error", "warning": "warn", "note": "off"}
    ours = {name.removeprefix("adapter."): r.level for name, r in all_rules().items() if name.startswith("adapter.")}
    assert ours == {name.replace("-", "_"): levels[level] for name, level in LEVELS.items()}


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


def test_bounds(tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        '[rules]\n"integrity.dtype" = { allowed = ["F32"], level = "warn" }\n[bounds]\n'
        '"blocks.*.density.structural" = { max = 0.6 }\n'
        '"blocks.2.coupling.first_token_share" = { max = 1e-9 }\n'
        '"summary.effective_context" = { min = 1e6, level = "warn" }\n'
        '"blocks.[01].operator.stable_rank" = { min = 0.5 }\n'
    )
    done = duat("check", "--policy", file, "--prompt", "def main(argv):", "-q", "--json")
    assert done.code == 1
    failed = done.findings()
    assert [(o["rule"], o["block"], o["where"]) for o in failed] == [
        ("bounds", 2, "blocks.2.coupling.first_token_share")
    ]
    assert failed[0]["beyond"] == pytest.approx(failed[0]["measured"] - 1e-9)
    assert failed[0]["source"] == str(file)
    assert failed[0]["location"] == {"file": str(file), "line": 5}
    assert {o["where"] for o in done.findings("warned")} == {
        "summary.effective_context",
        "model.embed_tokens.weight",
    }
    file.write_text('[bounds]\n"blocks.99.density.structural" = { max = 1 }\n')
    duat("check", "--policy", file, "--prompt", "a", "-q").refused("matches nothing", "blocks are 0 to 5")


def test_an_undefined_value_is_no_pass(tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "p.toml"
    for undefined, code in (("fail", 1), ("skip", 0)):
        file.write_text(f'[bounds]\n"blocks.0.coupling.first_token_share" = {{ max = 1, undefined = "{undefined}" }}\n')
        done = duat("check", "--policy", file, "--prompt", "a", "--max-tokens", "1", "-q", "--json")
        assert done.code == code
        if code:
            assert done.findings()[0]["measured"] is None
            assert "needs a second token" in done.findings()[0]["message"]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("**", "a", True),
        ("**.c", "a.b.c", True),
        ("a.**.c", "a.c", True),
        ("blocks.[0-3].x", "blocks.2.x", True),
        ("blocks.1?.x", "blocks.12.x", True),
        ("blocks.1?.x", "blocks.1.x", False),
        ("a", "a.b", False),
        ("", "a", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_every_field_of_a_report_can_be_bounded(duat: Duat) -> None:
    """Each number of a real report is at a known path, and each known path is somewhere in it."""
    from duat_cli.checks.paths import flatten
    from duat_cli.results.inspect import InspectReport

    args = ("--spectrum", "--terms", "--per-prompt", "--prompt", "def f(x):", "--json", "-q", "--layers", "1")
    report = InspectReport.model_validate(duat("inspect", *args).json)
    values, reasons = flatten(report)
    assert len(values) > 150
    for path in (*values, *reasons):
        assert is_known(path), path
    patterns = [p.replace("#", "*") for p in known_paths()]
    absent = [p for p in patterns if not any(matches(p, path) for path in (*values, *reasons))]
    assert [p for p in absent if "spreads" not in p] == []


def test_only_a_similar_key_is_suggested() -> None:
    assert nearest("xyzzy", all_rules()) == nearest("xyzzy", []) == ""
    assert nearest("Integrity.Nonfinit", all_rules()) == "integrity.nonfinite"
    assert suggestion("xyzzy", all_rules()) == ""


def test_wildcards_do_not_reach_the_nulls() -> None:
    """A policy from before they were there bounds what it did; one that names them bounds them."""
    path = "blocks.0.null.uniform.coupling.effective_context"
    assert not matches("blocks.**.effective_context", path)
    assert not matches("blocks.*.*.*.*.effective_context", path)
    assert matches("blocks.*.null.*.coupling.effective_context", path)
    assert is_known("blocks.*.null.reinitialised.operator.effective_heads")
    assert matches("weights.**", "weights.model.null.weight")  # a tensor's name is no group of the report


def test_what_a_bound_asks_for() -> None:
    assert asks_for("blocks.*.null.reinitialised.operator.effective_heads") == {"null"}
    assert asks_for("blocks.*.null.uniform.operator.effective_heads") == set()
    assert asks_for("blocks.*.null.*.operator.effective_heads") == asks_for("blocks.*.null.**") == {"null"}
    assert asks_for("blocks.*.null.u*.operator.effective_heads") == set()
    assert asks_for("blocks.*.*.*.*.effective_heads") == {"per_prompt"}  # wildcards do not reach the nulls
    assert asks_for("blocks.*.operator.stable_rank") == {"spectrum"}
    assert asks_for("terms.*.share") == {"terms"}
    assert asks_for("blocks.*.prompts.*.terms.linear.share") == {"per_prompt"}
    assert asks_for("blocks.*.operator.s*") == asks_for("blocks.*.*.s*_[nr]*") == {"spectrum"}
    assert asks_for("blocks.*.prompts.*.operator.s*") == {"spectrum", "per_prompt"}
    assert asks_for("blocks.*.spreads.operator.spectral_norm.high") == {"spectrum", "per_prompt"}
    assert asks_for("*.0.share") == asks_for("t*.*.share") == {"terms"}
    assert asks_for("blocks.*.operator.*") == asks_for("**") == set()
    assert leaves_out("blocks.*.operator.*") == leaves_out("**") == ["spectral_norm", "stable_rank"]
    assert leaves_out("blocks.*.operator.s*") == leaves_out("blocks.*.density.*") == []


def test_which_fields_may_be_negative() -> None:
    """Shares of a sum of vectors, and their spreads; a pattern that ends in a wildcard may be for such."""
    for pattern in ("blocks.*.terms.*.share", "summary.linear_share", "blocks.*.terms.own.s*", "terms.*.share"):
        assert may_be_negative(pattern), pattern
    for pattern in ("blocks.*.spreads.terms.linear.share.low", "blocks.*.coupling.*", "**"):
        assert may_be_negative(pattern), pattern
    for pattern in ("blocks.*.terms.own.norm", "blocks.*.range.share", "blocks.*.coupling.first_token_share"):
        assert not may_be_negative(pattern), pattern


@pytest.fixture
def small(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m")
    return tmp_path / "m"


def test_a_pattern_over_nothing_but_the_spectrum_has_it_computed(small: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[bounds]\n"blocks.*.operator.s*" = { max = 1e-9 }\n')
    done = duat("check", small, "--prompt", "hello", "-q", "--json", "--policy", file)
    found = [o for o in done.findings() if o["rule"] == "bounds"]
    assert len(found) == 4  # two fields of two blocks
    assert all(o["measured"] > 0 for o in found)
    assert not any("leaves out" in w for w in done.json["warnings"])


def test_a_pattern_over_more_leaves_the_spectrum_out_and_says_so_once(small: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[bounds]\n"blocks.*.operator.*" = { min = 0 }\n"blocks.0.operator.stable_rank" = { min = 0 }\n')
    done = duat("check", small, "--prompt", "hello", "-q", "--json", "--policy", file)
    assert done.code == 0
    said = [w for w in done.json["warnings"] if "leaves out" in w]
    assert len(said) == 1
    assert "p.toml: bounds.'blocks.*.operator.*' leaves out spectral_norm and stable_rank" in said[0]


def test_hostile_patterns_end_soon() -> None:
    assert not is_known("**." * 30 + "x")
    assert not is_known("*a" * 190)
    policy = read_policy("default")
    with pytest.raises(InputError, match="no rule is named so"):
        settings_of(policy, ["*a" * 90])


# --- exactness.range ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "code", "status"), [(1.0, 0, "passed"), (2e4, 0, "warned"), (6e4, 1, "failed")])
def test_activations_beyond_the_stored_dtype(factor: float, code: int, status: str, tmp_path: Path, duat: Duat) -> None:
    """A norm's gain scales its output, whose largest entry is about 2.5 of it."""
    bad.llama(tmp_path / "m", dtype="float16")

    def larger(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.1.input_layernorm.weight"] *= factor
        state["model.layers.1.self_attn.o_proj.weight"] *= 0

    bad.wedit(tmp_path / "m", larger)
    policy = tmp_path / "p.toml"
    policy.write_text('[rules]\n"integrity.*" = "off"\n')
    done = duat("check", tmp_path / "m", "--prompt", "hello", "-q", "--json", "--policy", policy)
    assert done.code == code
    outcomes = [o for o in done.json["outcomes"] if o["rule"] == "exactness.range"]
    assert [o["status"] for o in outcomes] == [status]
    assert outcomes[0]["measured"] == pytest.approx(2.5 * factor / 65504, rel=0.5)
    assert outcomes[0]["where"] == ("blocks.1.range.share" if factor > 1 else outcomes[0]["where"])
    assert any("float16" in w for w in done.json["warnings"]) == (status != "passed")


def test_a_wide_dtype_has_no_range_to_measure(small: Path, duat: Duat) -> None:
    done = duat("check", small, "--prompt", "hello", "-q", "--json", "--select", "exactness.range")
    (outcome,) = done.json["outcomes"]
    assert (done.code, outcome["status"], outcome["measured"]) == (0, "passed", None)
    assert "no activation comes near" in outcome["message"]


def test_the_range_is_no_drift_metric(small: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    assert duat("check", small, "--prompt", "hello", "-q", "--baseline", file, "--update-baseline").code == 0
    assert "largest_activation" not in file.read_text()
    assert ".range." not in file.read_text()
