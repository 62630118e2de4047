"""What a prediction is called."""

from __future__ import annotations

import pytest
import sample_reports as sample

from duat_cli.report.tables.attribute.report import render_attribute
from duat_cli.report.tables.attribute.words import BARE, called, is_bare, lost
from duat_cli.report.tables.page import Page
from duat_cli.results.attribute import AttributeReport
from duat_cli.results.base import Skipped


def of_kind(kind: str) -> AttributeReport:
    report = sample.attribute_report()
    [one, *_] = report.attribution
    target = one.target.model_copy(update={"kind": kind, "against": None, "against_mean": False})
    return report.model_copy(update={"attribution": [one.model_copy(update={"target": target})]})


@pytest.mark.parametrize(
    ("kind", "name", "bare"),
    [
        ("token", "logit", True),
        ("class", "logit", True),
        ("component", "value", False),
        ("norm", "length", False),
        ("log-probability", "linearised log-prob", False),
    ],
)
def test_a_number_is_called_what_it_is(kind: str, name: str, bare: bool) -> None:
    report = of_kind(kind)
    [one] = report.attribution
    assert called(one) == name
    assert is_bare(one) == bare
    assert ("length itself" in lost(one)) == (kind == "norm")
    shown = render_attribute(report, Page(width=200))
    assert f": {name} {one.logit:.3g}"[:12] in shown
    assert f"direct, straight to the {name}: " in shown
    assert f"written straight to the {name}, " in shown
    assert "own logit" not in shown
    assert (BARE[:40] in shown) == bare
    assert "where other heads look" in shown


def test_a_removal_without_a_number_has_its_reason_below() -> None:
    """Reasons for which all of a kind are left out stand there once, and are not told again."""
    report = sample.attribute_report()
    [one, *rest] = report.attribution
    measured = one.measured
    assert measured is not None
    [first, *_] = measured.tokens
    gone = [
        first.model_copy(update={"cut": None, "reasons": {"cut": why}})
        for why in ("its place has nothing else", "tokens are mixed")
    ]
    left_out = [Skipped(what="attention to a token", why="tokens are mixed")]
    found = measured.model_copy(update={"tokens": gone, "skipped": left_out})
    shown = render_attribute(
        report.model_copy(update={"attribution": [one.model_copy(update={"measured": found}), *rest]}), Page(width=200)
    )
    assert f"No cut of token {first.position}: its place has nothing else." in shown
    assert shown.count("tokens are mixed") == 1
