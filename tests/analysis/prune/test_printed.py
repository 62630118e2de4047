"""Eq. 16 in the report: which sets and parts, the measured change a second way, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import as_loaded, token_ids, two_single
from removal import OWN, weights_zeroed
from sharing import model_of

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.run import prune_bound
from duat_cli.loading.prompts import Prompt
from duat_cli.models import budgets
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.report import PruneReport

OPTIONS = PruneOptions(probes=4, measure=3, budget=0.3)


def report_of(model: Any, options: PruneOptions = OPTIONS, prompts: int = 3) -> PruneReport:
    given = [Prompt("", str(k), token_ids(model, 5 + k, k), k) for k in range(prompts)]
    return prune_bound(as_loaded(model), given, [], options, lambda *_: None).report


def term_of(name: str) -> TermId:
    block, *rest = name.removeprefix("block.").split(".")
    return TermId(rest[0], int(block), int(rest[1])) if rest else TermId("block", int(block))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model_type", "parts"), [("gpt2", 3), ("gemma4 sharing", 4)])
def test_measured_is_the_change_at_the_last_block_with_the_weights_at_zero(model_type: str, parts: int) -> None:
    """Of every whole part and every chosen set, by a plain hook; and the counts beside it."""
    model = model_of(model_type)
    report = report_of(model, prompts=2)
    sets = {plan.granularity: plan.set for plan in report.plans if plan.set}
    assert {row.name for row in report.eq16 if row.what == "set"} == set(sets)
    depth = len(report.blocks)
    assert len([row for row in report.eq16 if row.what == "part"]) == parts * depth
    last = model.get_submodule(OWN[model_type].blocks)[-1]
    given = [token_ids(model, 5 + k, k) for k in range(2)]

    def at_last(ids: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        with (
            last.register_forward_hook(lambda m, a, o: seen.append(o if torch.is_tensor(o) else o[0])),
            torch.no_grad(),
        ):
            model(input_ids=ids)
        return seen[0].double()

    before = [at_last(ids) for ids in given]
    for row in report.eq16:
        terms = [term_of(name) for name in (sets[row.name] if row.what == "set" else [row.name])]
        assert row.terms == len(terms)
        if any(t.kind == "block" and t.block == depth - 1 for t in terms):
            continue  # the hook would see what the passed-over block gives
        with weights_zeroed(model, OWN[model_type], terms):
            after = [at_last(ids) for ids in given]
        changes = [float((y - x).norm() / x.norm()) for x, y in zip(before, after, strict=True)]
        assert row.measured == pytest.approx(sum(changes) / 2, rel=1e-4, abs=1e-7), row.name
        assert row.ratio == pytest.approx(row.measured / row.bound)
        assert row.exceeded is not None
        assert (row.exceeded > 0) == (row.ratio_largest > 1.0001)
    assert report.certificate.relative_error >= max(row.error for row in report.eq16)


def test_what_was_not_ablated_has_a_bound_and_a_reason() -> None:
    rows = report_of(two_single("llama"), replace(OPTIONS, measure=0)).eq16
    parts = [row for row in rows if row.what == "part"]
    assert parts
    assert all(row.measured is None and row.exceeded is None and row.bound > 0 for row in parts)
    assert all(set(row.reasons) == {"measured", "ratio", "ratio_largest", "exceeded"} for row in parts)
    assert all(row.measured is not None for row in rows if row.what == "set")


def test_in_the_last_block_what_nothing_reads_is_bounded_with_equality() -> None:
    rows = {row.name: row for row in report_of(two_single("llama")).eq16}
    last = max(row.block for row in rows.values() if row.block is not None)
    row = rows[f"block.{last}.ffn.0"]
    assert row.measured == pytest.approx(row.bound, rel=1e-5)
    assert row.exceeded == 0


def test_only_the_first_prompts_that_fit_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("llama")
    quick = replace(OPTIONS, effort="quick")
    assert {row.prompts for row in report_of(model, quick).eq16} == {quick.spent.printed}
    monkeypatch.setattr(budgets, "PRINTED_BYTES", 1)
    report = report_of(model)
    assert report.eq16 == []
    assert any(one.what == "Eq. 16" for one in report.skipped)


def test_without_sets_or_parts_there_is_nothing_to_say() -> None:
    """One prompt, and no set within the budget."""
    report = report_of(two_single("llama"), replace(OPTIONS, kinds=("head",), budget=1e-9), prompts=1)
    assert report.eq16 == []
    assert report.certificate.relative_error > 0
    assert all(plan.removed == 0 for plan in report.plans)
