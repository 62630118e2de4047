"""Every report has a table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sample_reports as sample

from duat_cli.report.schema import REPORTS
from duat_cli.report.tables.page import Page
from duat_cli.report.tables.verify import render_verify
from duat_cli.report.text import to_text
from duat_cli.results.base import Report
from duat_cli.results.inspect import VerifyStacks

MADE: dict[str, Callable[[], Report]] = {
    "attribute": sample.attribute_report,
    "check": sample.check_report,
    "compare": sample.compare_report,
    "explain": sample.explain_report,
    "inspect": sample.inspect_report,
    "lora-diff": sample.lora_report,
    "matrix": sample.matrix_report,
    "matrix --network": sample.network_report,
    "plan": sample.plan_report,
    "prune-bound": sample.prune_report,
    "support": sample.support_report,
    "verify": sample.verify_report,
}


@pytest.mark.parametrize("command", REPORTS)
def test_every_report_has_its_table(command: str) -> None:
    report = MADE[command]()
    assert report.command == command
    assert len(to_text(report, Page(80)).splitlines()) > 1


def test_stacks_stand_one_below_the_other() -> None:
    one, other = sample.verify_report(), sample.verify_report(exact=False)
    page, stacks = Page(80), VerifyStacks(duat_version="0.1.0", stacks=[one, other])
    assert to_text(stacks, page) == f"{render_verify(one, page)}\n\n{render_verify(other, page)}"
