"""The rules pruning.*: the shares that `duat prune-bound` gives, held against their maximum."""

from __future__ import annotations

from pathlib import Path

from running_checks import Duat

TEXT = ("--prompt", "def main(argv):", "-q", "--json")


def test_the_shares_are_those_of_prune_bound(small: Path, tmp_path: Path, duat: Duat) -> None:
    options = ("--budget", "1e-6", "--probes", "4", "--measure", "0")
    shares = {}
    for kind in ("neuron", "head"):  # both at once would be one set
        [plan] = duat("prune-bound", small, "--granularity", kind, *options, *TEXT).json["plans"]
        shares[f"pruning.{kind}s"] = plan["share"]
    assert 0.1 < shares["pruning.neurons"] < 0.2
    file = tmp_path / "p.toml"
    for most, code in ((0.2, 0), (0.1, 1)):
        file.write_text(
            f'extends = "default"\n[rules]\n"pruning.*" = {{ level = "error", max = {most} }}\n'
            "[pruning]\nbudget = 1e-6\nprobes = 4\n"
        )
        done = duat("check", small, "--policy", file, "--select", "pruning.*", *TEXT)
        assert done.code == code, done.text
        found = {o["rule"]: (o["measured"], o["status"]) for o in done.json["outcomes"]}
        assert found == {rule: (share, "failed" if share > most else "passed") for rule, share in shares.items()}
