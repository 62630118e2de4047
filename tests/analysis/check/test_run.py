"""The door of `duat check`: what is looked at for the rules that are on, and why the rest is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from duat_cli.analysis.check.run import CheckRequest, check
from duat_cli.analysis.inspect.run import InspectOptions
from duat_cli.analysis.opening import ModelRequest, PromptRequest
from duat_cli.checks.conclude import NO_FORWARD, plan
from duat_cli.checks.policy import read_policy
from duat_cli.checks.settings import settings_of
from duat_cli.errors import NoSignalError, UnsupportedModelError
from duat_cli.loading.checkpoint.source import demo_adapter_path
from duat_cli.results.base import Run
from duat_cli.results.check import CheckReport

RUN = Run(started="2026-01-01T00:00:00+00:00", seconds=0.0, peak_memory_bytes=None)


def checked(
    model: Path | None, *select: str, policy: str = "default", weights_only: bool = False, adapter: str | None = None
) -> tuple[CheckReport, list[str]]:
    """The report, and the steps to it."""
    found, steps = read_policy(policy), list[str]()
    request = CheckRequest(
        ModelRequest(None if model is None else str(model), None, None, None, False, "float32", "cpu"),
        PromptRequest(["abc"], None, None),
        adapter,
    )
    settled = plan(found, settings_of(found, select), None, False, weights_only, "float32")
    report, text = check(settled, request, lambda done, total, what: steps.append(what), lambda: RUN)
    assert text is None
    return report, list(dict.fromkeys(steps))


def skipped(report: CheckReport) -> dict[str, str]:
    return {o.rule: o.message for o in report.outcomes if o.status == "skipped"}


def test_the_model_runs_only_where_a_rule_needs_it(checkpoint: Path) -> None:
    report, steps = checked(checkpoint, "integrity.files", "integrity.nonfinite")
    assert steps == [f"looking for {checkpoint}", "reading the weights"]
    assert report.model.fingerprint is None
    report, steps = checked(checkpoint, "exactness.*", "integrity.files")
    assert steps[:2] == ["reading the prompts", f"looking for {checkpoint}"]
    assert report.model.fingerprint is not None
    assert report.certificate is not None


def test_why_something_was_not_looked_at(checkpoint: Path) -> None:
    found = skipped(checked(checkpoint, weights_only=True)[0])
    assert NO_FORWARD in found["exactness.certificate"]
    assert any("no --adapter was given" in why for rule, why in found.items() if rule.startswith("adapter."))


def test_an_adapter_is_linted_against_the_model() -> None:
    adapter = str(demo_adapter_path())
    report, steps = checked(None, "adapter.*", adapter=adapter)
    assert steps[-1] == f"checking the adapter {adapter}"
    assert report.verdict == "passed"
    assert skipped(report) == {}


def test_a_bound_asks_for_what_takes_long(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[InspectOptions] = []

    def refuse(loaded: object, prompts: object, options: InspectOptions, progress: object) -> None:
        asked.append(options)
        raise UnsupportedModelError("not today")

    monkeypatch.setattr("duat_cli.analysis.inspect.run.inspect", refuse)
    file = tmp_path / "p.toml"
    for bounds in ("", '[bounds]\n"blocks.*.operator.spectral_norm" = { max = 1e9 }\n'):
        file.write_text('extends = "default"\n' + bounds)
        with pytest.raises(UnsupportedModelError, match="not today; --weights-only checks what needs no forward pass"):
            checked(checkpoint, policy=str(file))
    assert [options.spectrum for options in asked] == [False, True]


def test_a_run_that_says_nothing_passes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*given: object) -> None:
        raise NoSignalError("every hidden state is zero")

    monkeypatch.setattr("duat_cli.analysis.inspect.run.inspect", silent)
    with pytest.raises(NoSignalError):
        checked(checkpoint, "exactness.*", "integrity.files")
