"""Every breakage through the gate, without a baseline and with one: is it caught, and is the cause named first?

Each is looked at once, on two prompts; what was seen is judged both ways. `PYTHONPATH=tests/checks python
tests/checks/test_breakages.py` writes the table of the documentation anew.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from breakages import ADAPTERS, BREAKAGES, HEADER, SOUND, State, made, permutation, table, weights
from helpers import minilm
from running_checks import few_bundled

from duat_cli.analysis.check import run
from duat_cli.analysis.opening import ModelRequest, PromptRequest
from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Evidence
from duat_cli.checks.verdict.conclude import CheckPlan, Subject, conclude, plan
from duat_cli.errors import DuatError
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path
from duat_cli.results.base import Run
from duat_cli.results.check import CheckReport

PAGE = Path(__file__).parents[2] / "configs" / "docs" / "gate.md"
UNCAUGHT = {  # with a baseline, without the rules on config and tokenizer
    "a random lm_head, untied",
    "a token with id 2100",
    "an unused tensor",
    "another chat template",
    "eos_token_id 1 to 7",
    "generation_config: bos_token_id 99999",
    "generation_config: eos_token_id 7",
}
RUN = Run(started="2026-01-01T00:00:00+00:00", seconds=0.0, peak_memory_bytes=None)


@dataclass(frozen=True)
class Seen:
    """A report, or why there is none."""

    report: CheckReport | None
    error: str = ""

    def described(self) -> str:
        """In the words of the table."""
        if self.report is None:
            return f"refused {self.error}"
        cause = self.report.causes[0] if self.report.causes else None
        if cause is None:
            return "passes"
        return cause.rules[0] if self.report.verdict == "failed" else f"warns {cause.rules[0]}"


def plans(baseline: Path | None, update: bool = False) -> CheckPlan:
    name = None if baseline is None else str(baseline)
    return plan("default", [], name, update, False, "float32")


def look(settled: CheckPlan, model: Path, adapter: Path | None) -> tuple[CheckReport, str | None]:
    request = run.CheckRequest(
        ModelRequest(str(model), None, None, None, False, "float32", "cpu", None),
        PromptRequest(None, None, None),
        None if adapter is None else str(adapter),
    )
    return run.check(settled, request, lambda *step: None, lambda _planned=None, **_: RUN)


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    """Two of the bundled prompts, on which every breakage is told as on the first four; on more, more is found."""
    with few_bundled(2, first=6):
        yield


@pytest.fixture(scope="module")
def baseline(few: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo as it is."""
    file = tmp_path_factory.mktemp("baseline") / "b.json"
    _, text = look(plans(file, update=True), demo_path(), None)
    assert text is not None
    file.write_text(text, encoding="utf-8")
    return file


def both_ways(name: str, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, Seen]:
    """What is found without the baseline and with it, of one look at the checkpoint."""
    breakage, alone = BREAKAGES[name], list[Seen]()
    model = made(demo_path(), tmp_path / "model", breakage.change)
    adapter = breakage.adapter and made(demo_adapter_path(), tmp_path / "adapter", breakage.adapter)

    def twice(settled: CheckPlan, evidence: Evidence, subject: Subject, when: Run) -> tuple[CheckReport, str | None]:
        own = replace(evidence, absent=dict(evidence.absent))
        alone.append(Seen(conclude(plans(None), own, subject, when)[0]))
        return conclude(settled, evidence, subject, when)

    monkeypatch.setattr(run, "conclude", twice)
    try:
        against = Seen(look(plans(baseline), model, adapter)[0])
    except DuatError as error:
        against = Seen(None, str(error))
        if not alone and "baseline" in str(error):  # before anything is loaded
            with contextlib.suppress(DuatError):
                look(plans(None), model, adapter)
    return (alone or [against])[0], against


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_breakage(name: str, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = BREAKAGES[name].alone, BREAKAGES[name].against
    for expected, seen in zip(wanted, both_ways(name, baseline, tmp_path, monkeypatch), strict=True):
        if expected.startswith("refused "):
            assert seen.report is None, seen.described()
            assert expected.removeprefix("refused ") in seen.error
            assert "\n" not in seen.error
        else:
            assert seen.described() == expected


def test_with_a_baseline_every_breakage_fails_and_nothing_else() -> None:
    """What needs a rule that is not there yet is caught with it. A baseline holds nothing of an adapter."""
    held = {n: b for n, b in BREAKAGES.items() if b.kind != ADAPTERS}
    passing = {n for n, b in held.items() if b.against == "passes" or b.against.startswith("warns ")}
    sound = {n for n, b in BREAKAGES.items() if b.kind == SOUND}
    assert passing - sound <= (set() if "drift.config" in all_rules() else UNCAUGHT)
    assert {n for n in sound if BREAKAGES[n].against != "passes"} <= {"float32 norms"}


# -- a real embedder ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(few: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """all-MiniLM-L6-v2, which has no head over its tokens, and its baseline."""
    model, file = minilm(), tmp_path_factory.mktemp("e") / "b.json"
    _, text = look(plans(file, update=True), model, None)
    assert text is not None
    file.write_text(text, encoding="utf-8")
    return model, file


def shuffled_rows(state: State) -> None:
    name = "embeddings.word_embeddings.weight"
    state[name] = state[name][permutation(len(state[name]))]


def keys_for_values(state: State) -> None:
    for name in [n for n in state if ".attention.self.key." in n]:
        other = name.replace(".key.", ".value.")
        state[name], state[other] = state[other], state[name]


@pytest.mark.parametrize(
    ("change", "named", "moved"),
    [
        (shuffled_rows, "'embeddings.word_embeddings.weight' moved", 1),
        (keys_for_values, "24 tensors moved, first 'encoder.layer.0.attention.self.key.", 24),
    ],
)
def test_a_breakage_of_a_real_embedder(
    change: Callable[[State], None], named: str, moved: int, embedder: tuple[Path, Path], tmp_path: Path
) -> None:
    """Found with its baseline: the weights that moved are the cause, and the embeddings that they make, behind it."""
    folder = made(embedder[0], tmp_path / "m", weights(change))
    report = look(plans(embedder[1]), folder, None)[0]
    assert report.verdict == "failed"
    assert report.causes[0].rules == ["drift.weights"]
    assert report.causes[0].message.startswith(named)
    assert len(report.causes[0].findings) == moved
    [agreement] = [o for o in report.outcomes if o.rule == "behaviour.agreement"]
    assert (agreement.status, agreement.behind) == ("failed", report.causes[0].id)
    assert agreement.measured is not None
    assert agreement.measured > 0.1  # 1 - cosine to the embeddings of the baseline
    shutil.rmtree(folder)  # 90 MB


def test_a_real_embedder_is_its_own_baseline(embedder: tuple[Path, Path]) -> None:
    report = look(plans(embedder[1]), embedder[0], None)[0]
    assert report.verdict == "passed"
    assert report.behaviour is not None
    assert report.behaviour.loss_per_token is None


# -- the page -----------------------------------------------------------------------------------------------------


def parts(page: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page behind it."""
    before, _, rest = page.partition(HEADER)
    inside, _, after = rest.partition("\n\n")
    return before, HEADER + inside + "\n", "\n" + after


def test_the_page_has_the_table() -> None:
    assert parts(PAGE.read_text(encoding="utf-8"))[1] == table()


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + after, encoding="utf-8")
    sys.stdout.write(table())
