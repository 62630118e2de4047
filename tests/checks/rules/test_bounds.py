"""Bounds of a policy on fields of the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_checks import Duat

from duat_cli.checks.paths import is_known, known_paths, matches


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
    assert {o["where"] for o in done.findings("warned")} == {"summary.effective_context", "model.embed_tokens.weight"}
    file.write_text('[bounds]\n"blocks.99.density.structural" = { max = 1 }\n')
    duat("check", "--policy", file, "--prompt", "a", "-q").refused("matches nothing", "blocks are 0 to 5")


def test_an_undefined_value_is_no_pass(tmp_path: Path, short: Path, duat: Duat) -> None:
    file = tmp_path / "p.toml"
    for undefined, code in (("fail", 1), ("skip", 0)):
        file.write_text(f'[bounds]\n"blocks.0.coupling.first_token_share" = {{ max = 1, undefined = "{undefined}" }}\n')
        done = duat("check", short / "demo", "--policy", file, "--prompt", "a", "--max-tokens", "1", "-q", "--json")
        assert done.code == code
        if code:
            assert done.findings()[0]["measured"] is None
            assert "needs a second token" in done.findings()[0]["message"]


def test_every_field_of_a_report_can_be_bounded(short: Path, duat: Duat) -> None:
    """Each number of a real report is at a known path, and each known path is somewhere in it."""
    from duat_cli.checks.paths import flatten
    from duat_cli.results.inspect import InspectReport

    args = (
        "--spectrum",
        "--terms",
        "--end-to-end",
        "--routing",
        "--heads",
        "--per-prompt",
        "--prompt",
        "def f(x):",
        "--layers",
        "1",
    )
    report = InspectReport.model_validate(duat("inspect", short / "demo", *args, "--json", "-q").json)
    values, reasons = flatten(report)
    assert len(values) > 150
    for path in (*values, *reasons):
        assert is_known(path), path
    patterns = [p.replace("#", "*") for p in known_paths()]
    absent = [p for p in patterns if not any(matches(p, path) for path in (*values, *reasons))]
    assert [p for p in absent if "spreads" not in p] == []


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
