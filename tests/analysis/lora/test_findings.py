"""What prompts say together, one by one in constant memory, against the whole list of them."""

from __future__ import annotations

import random
import statistics

import pytest

from duat_cli.analysis.lora import findings as module
from duat_cli.analysis.lora.findings import Findings
from duat_cli.analysis.lora.prediction import ONE_TOKEN
from duat_cli.analysis.lora.prompts import Compared
from duat_cli.results.lora import AnswerChange, PromptChange

COUNT = 60
LOSS = ("loss_change", "loss_change_low", "loss_change_high")


def change(number: int, chance: random.Random, *, finite: bool = True) -> PromptChange:
    """Of few different numbers, so that some prompts are alike."""
    values: dict[str, float | None] = {
        "kl": chance.randint(0, 9) / 7,
        "loss_base": chance.random(),
        "loss_tuned": chance.random(),
    }
    reasons: dict[str, str] = {}
    if not finite:
        values, reasons = dict.fromkeys(values), dict.fromkeys(values, "logits are not finite")
    elif number % 5 == 0:
        reasons = dict.fromkeys(("loss_base", "loss_tuned"), ONE_TOKEN)
    return PromptChange(
        prompt=number,
        output=chance.randint(0, 9) / 7,
        **{name: None if name in reasons else value for name, value in values.items()},
        moved_tokens=[],
        reasons=reasons,
    )


def add(found: Findings, one: PromptChange) -> None:
    """A prompt of no blocks."""
    found.add(Compared([], 0.0, 0.0, one))


@pytest.mark.parametrize("broken", [set(), {7, 31}])
@pytest.mark.parametrize("listed", [10, COUNT])
def test_against_the_whole_list(broken: set[int], listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTED", listed)
    chance, found = random.Random(listed), Findings()
    rows = [change(k, chance, finite=k not in broken) for k in range(COUNT)]
    for row in rows:
        add(found, row)
    ranked = sorted(rows, key=lambda row: -row.output if broken else -(row.kl or 0.0))
    assert found.order.most == ranked[:listed]
    known = [row for row in ranked if row.kl is not None]
    assert (found.order.first, found.order.last) == (known[0], known[-1])
    if broken:
        assert (found.whole.kl, found.whole.loss) == (None, None)
        assert found.whole.reasons == dict.fromkeys(("kl", *LOSS), "logits are not finite")
        return
    pairs = [(row.loss_base, row.loss_tuned) for row in rows]
    losses = [tuned - base for base, tuned in pairs if base is not None and tuned is not None]
    assert found.summary is None
    whole = found.whole
    assert whole.kl == statistics.fmean(row.kl or 0.0 for row in rows)
    assert whole.loss == statistics.fmean(losses)
    assert (whole.scored, whole.better) == (len(losses), sum(loss < 0 for loss in losses))
    half = 2.0117 * statistics.stdev(losses) / len(losses) ** 0.5  # Student's t at 0.975, 47 degrees of freedom
    assert len(losses) == 48
    assert whole.loss_interval == pytest.approx((whole.loss - half, whole.loss + half), rel=1e-3)
    assert whole.reasons == {}


def test_prompts_of_one_token_have_no_loss() -> None:
    found = Findings()
    add(found, change(0, random.Random(0)))
    assert (found.whole.loss, found.whole.reasons) == (None, dict.fromkeys(LOSS, ONE_TOKEN))


def test_what_the_model_itself_says_has_means_of_its_own() -> None:
    chance, found = random.Random(1), Findings()
    said = [AnswerChange(tokens=k + 1, kl=k / 7, loss_base=2.0, loss_tuned=1.0 + k / 10) for k in range(6)]
    for number, answer in enumerate([*said, None]):
        add(found, change(number, chance).model_copy(update={"answer": answer}))
    summary = found.summary
    assert summary is not None
    assert (summary.prompts, summary.tokens) == (6, 21)
    assert summary.kl == pytest.approx(15 / 42)
    changes = [k / 10 - 1 for k in range(6)]
    half = 2.5706 * statistics.stdev(changes) / 6**0.5  # Student's t at 0.975, 5 degrees of freedom
    assert summary.loss_change == pytest.approx(statistics.fmean(changes))
    assert summary.loss_change_low == pytest.approx(statistics.fmean(changes) - half, rel=1e-3)
    assert summary.loss_change_high == pytest.approx(statistics.fmean(changes) + half, rel=1e-3)
    endless = said[0].model_copy(update={"kl": None, "loss_tuned": None, "reasons": {"kl": "endless", "loss": "why"}})
    add(found, change(9, chance).model_copy(update={"answer": endless}))
    assert found.summary is not None
    assert (found.summary.kl, found.summary.loss_change) == (None, None)
    assert found.summary.reasons == {"kl": "endless", **dict.fromkeys(LOSS, "why")}


@pytest.mark.parametrize(("prompts", "why"), [(4, "fewer than 5 prompts"), (5, "as much on every")])
def test_a_missing_interval_has_its_reason(prompts: int, why: str) -> None:
    found, same = Findings(), change(0, random.Random(2)).model_copy(update={"loss_base": 2.0, "loss_tuned": 1.0})
    for _ in range(prompts):
        add(found, same.model_copy(update={"reasons": {}}))
    assert found.whole.loss == -1.0
    assert found.whole.loss_interval is None
    assert found.whole.reasons.keys() == set(LOSS[1:])
    assert all(why in said for said in found.whole.reasons.values())
