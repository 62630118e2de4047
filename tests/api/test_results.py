"""What a report can do beside being one: text, HTML, tables."""

from __future__ import annotations

import copy
import functools
import html
import json
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from unpacking import reports_in

import duat_cli as duat
from duat_cli.api.results import InspectResult
from duat_cli.api.words import page_of
from duat_cli.report.json import to_json
from duat_cli.results.inspect import InspectReport


@pytest.fixture(scope="module")
def report() -> InspectResult:
    return duat.inspect(prompts=["The cat <b>sat</b> & slept."], null="uniform")


@functools.cache
def made(call: Callable[[], Any]) -> Any:
    """Its report on the demo, which is only read."""
    return call()


@functools.cache
def weights_alone() -> Any:
    return duat.check(weights_only=True)


def test_a_row_an_entry_and_a_column_a_number(report: InspectResult) -> None:
    pytest.importorskip("pandas")
    frame = report.to_pandas("blocks")
    assert list(frame["index"]) == [block.index for block in report.blocks] == list(range(6))
    assert list(frame["operator.effective_heads"]) == [block.operator.effective_heads for block in report.blocks]
    assert list(frame["null.uniform.density.numerical"]) == [
        block.null.uniform.density.numerical for block in report.blocks if block.null.uniform
    ]


def test_every_table_of_every_report_is_one(report: InspectResult) -> None:
    pytest.importorskip("pandas")
    reports = [report, made(duat.matrix), made(duat.lora_diff), weights_alone(), made(duat.plan)]
    for each in reports:
        assert each.tables
        for name in each.tables:
            assert len(each.to_pandas(name)) > 0
            if "." not in name:
                assert len(each.to_pandas(name)) == len(getattr(each, name))
        for text in (each.to_text(80), each._repr_html_()):
            assert "\x1b" not in text


@pytest.mark.parametrize("width", ["80", 80.0, None, True, 0, -5])
def test_a_width_that_is_no_number_of_characters_is_refused(width: object) -> None:
    with pytest.raises(duat.InputError, match=r"^width .*: expected a whole number"):
        weights_alone().to_text(width)  # type: ignore[arg-type]


def test_a_table_names_each_where_it_is_asked_to() -> None:
    report = made(duat.lora_diff)
    assert "--all shows a row for each parameter" in report.to_text()
    whole = report.to_text(every=True)
    assert "--all" not in whole
    assert all(module.name in whole for module in report.modules)
    checked = weights_alone()
    assert "--all lists them" in checked.to_text()
    assert "--all" not in checked.to_text(every=True)
    assert max(map(len, report.to_text(80, every=True).splitlines())) <= 80
    assert max(map(len, report.to_text(80, wide=True, every=True).splitlines())) > 80


def test_a_list_inside_of_another_one_says_where_its_entries_are() -> None:
    pytest.importorskip("pandas")
    found = duat.compare(prompts=["The cat sat on the mat.", "The cat sat on the hat."])
    assert found.comparison is not None
    frame = found.to_pandas("comparison.blocks.heads")
    wanted = [
        (block, head.head, head.relative) for block, entry in enumerate(found.comparison.blocks) for head in entry.heads
    ]
    assert len(wanted) == 36
    assert list(zip(frame["in comparison.blocks"], frame["head"], frame["relative"], strict=True)) == wanted
    assert len(found.to_pandas("pairs.runs")) == len(found.pairs[0].runs)


def test_what_heads_read_is_a_table() -> None:
    pytest.importorskip("pandas")
    found = duat.inspect(prompts=["The cat sat. The cat sat."], null="uniform", heads=True)
    frame = found.to_pandas("blocks.heads.each")
    wanted = [
        (block.index, head.index, head.induction_share)
        for block in found.blocks
        for head in (block.heads.each if block.heads and block.heads.each else ())
    ]
    assert len(wanted) == 36
    assert list(zip(frame["in blocks"], frame["index"], frame["induction_share"], strict=True)) == wanted
    assert (found.to_pandas("blocks")["heads.uniform.induction_share"] > 0).all()


def test_a_report_is_shown_in_a_line(report: InspectResult) -> None:
    shown = repr(report)
    error = f"{report.certificate.relative_error:.1e}"
    assert shown == f"<InspectResult demo: 6 blocks, 1 prompt, exact {error}; tables prompts, blocks>" == str(report)
    checked = weights_alone()
    calls = (duat.lora_diff, duat.plan, duat.matrix, duat.support, duat.compare)
    others = [duat.attribute(prompts="The cat", max_tokens=3), duat.explanation("corr."), *map(made, calls)]
    for each in [*others, checked]:
        assert re.fullmatch(rf"<{type(each).__name__}[^\n]{{,250}}>", repr(each))
    assert ": passed; tables " in repr(checked)


def test_a_copy_is_equal(report: InspectResult) -> None:
    for one in (report, duat.verify(prompts="The cat"), weights_alone()):
        for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert again == one
            assert again.to_json() == one.to_json()  # type: ignore[attr-defined]
    assert report != report.model_copy(update={"duat_version": "0"})
    assert report != InspectReport.model_validate_json(report.to_json())


def test_another_name_is_refused(report: InspectResult) -> None:
    with pytest.raises(duat.InputError, match="'layers': no table of this report; it has prompts, blocks"):
        report.to_pandas("layers")


def test_without_pandas_it_says_what_to_install(report: InspectResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(duat.InputError, match=re.escape("pip install 'duat-cli[pandas]'")):
        report.to_pandas("blocks")


def test_the_html_is_the_table_with_its_characters_escaped(report: InspectResult) -> None:
    shown = report._repr_html_()
    assert shown.startswith("<pre ")
    assert set(re.findall(r"</?(\w+)", shown)) == {"pre", "span"}
    text = html.unescape(re.sub(r"<[^>]+>", "", shown))
    assert [line.rstrip() for line in text.strip().splitlines()] == report.to_text(120).strip().splitlines()


def test_the_page_is_that_of_the_command(report: InspectResult) -> None:
    shown = report.to_html()
    assert shown == page_of([(None, InspectReport.model_validate_json(report.to_json()))])
    assert reports_in(shown)[0]["report"] == json.loads(report.to_json())
    assert "<b>sat" not in shown


def test_every_report_with_pictures_has_a_page() -> None:
    pages = [made(duat.matrix), made(duat.compare), made(duat.plan), weights_alone()]
    assert all(each.to_html().startswith("<!doctype html>") for each in pages)
    with pytest.raises(duat.InputError, match="a report of support has no page; pages: attribute, check"):
        made(duat.support).to_html()


def test_foreign_text_is_no_element() -> None:
    entry = (
        made(duat.support).entries[0].model_copy(update={"status": "refused", "reason": "<script>alert(1)</script>"})
    )
    report = made(duat.support).model_copy(update={"entries": [entry]})
    assert "&lt;script&gt;" in report._repr_html_()
    assert "<script" not in report._repr_html_()


def test_the_json_is_the_reports(report: InspectResult) -> None:
    again = type(report).model_validate_json(report.to_json())
    assert again.to_json() == report.to_json() == to_json(report)
    with pytest.raises(duat.InputError, match="not made by a call"):
        again.operator()
