"""`verify` says of every block what `inspect` says of how exact it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from duat_cli.analysis import session
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument import plain
from duat_cli.results.inspect import VerifyReport

Encoded = Callable[..., list[Prompt]]
TEXTS = ("Nui zi created Nui zi dynamics", "def f(x):", "one two three one two")


def test_verify_agrees_with_inspect(checkpoint: Path, loaded: LoadedModel, prompts: Encoded) -> None:
    report = inspect(loaded, prompts(loaded, *TEXTS), InspectOptions(), lambda *_: None)
    again = load(str(checkpoint))
    checked = verify(again, prompts(again, *TEXTS), lambda *_: None)
    assert checked.certificate == report.certificate
    assert [b.certificate_error for b in checked.blocks] == [b.certificate_error for b in report.blocks]
    assert [b.operator_error for b in checked.blocks] == [b.operator.certificate_error for b in report.blocks]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_processes_that_share_the_prompts_find_the_same(loaded: LoadedModel, prompts: Encoded) -> None:
    def report(processes: int) -> tuple[VerifyReport, list[str]]:
        said: list[str] = []
        shared = replace(loaded, processes=processes)
        return verify(shared, prompts(loaded, *TEXTS), lambda *at: said.append(at[2])), said

    (alone, heard), (shared, said) = report(1), report(2)
    assert shared == alone.model_copy(update={"run": shared.run})
    assert heard[-1] == "prompt 3 of 3"
    assert "prompt 1 of 3" in said


def test_a_prompt_that_is_not_exact_counts_in_whatever_process_it_runs(
    loaded: LoadedModel, prompts: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instruments that change the model under the last prompt alone."""
    given = prompts(loaded, *TEXTS)
    last, honest = given[-1].input_ids.shape[1], plain.deviation

    def deviation(instrumented: plain.Outputs, untouched: plain.Outputs) -> float:
        return 0.5 if untouched.whole.shape[1] == last else honest(instrumented, untouched)

    monkeypatch.setattr(session, "deviation", deviation)
    assert sum(prompt.input_ids.shape[1] == last for prompt in given) == 1
    for processes in (1, 2):
        report = verify(replace(loaded, processes=processes), given, lambda *_: None)
        assert report.certificate.plain_error == 0.5
        assert not report.certificate.exact
