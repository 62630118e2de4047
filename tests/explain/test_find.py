"""`duat explain`: every name of the output is known, with what is declared of it, and without loading a model's
libraries."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from typing import Annotated

import pytest
from children import PATIENCE
from pydantic import Field

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rules.adapter import LEVELS
from duat_cli.cli.main import PANELS, run
from duat_cli.errors import InputError
from duat_cli.explain import fields
from duat_cli.explain.find import everything, explain
from duat_cli.report.schema import REPORTS, schema_of
from duat_cli.report.tables import columns, nulls
from duat_cli.report.tables import inspect as table
from duat_cli.report.tables import lora as lora_table
from duat_cli.report.tables import verify as verify_table
from duat_cli.report.tables.prune import report as prune_table
from duat_cli.results.base import Result
from duat_cli.results.explained.report import Explanation, Kind
from duat_cli.results.meaning import Meaning, meaning_of
from duat_cli.results.prune.terms import Prediction


def named(name: str, kind: Kind) -> list[Explanation]:
    return [entry for entry in explain(name).entries if entry.kind == kind]


@functools.cache
def schema_fields(report: str) -> set[str]:
    """A second way to a report's field names: its JSON Schema."""
    schema = schema_of(report)
    parts = [schema, *schema.get("$defs", {}).values()]
    return {name for part in parts for name in part.get("properties", {})}


@pytest.mark.parametrize("report", REPORTS)
def test_every_field_of_every_report_has_a_definition_and_a_place(report: str) -> None:
    for name in schema_fields(report):
        here = [e for e in named(name, "field") if e.name == name]
        assert any(place.startswith(f"{report}: ") for entry in here for place in entry.where), name
        assert all(entry.definition for entry in here), name


LEANING = re.compile(r"(of|as|by|with|through|for|those|this|that|the same|its?|whose)\b", re.IGNORECASE)


def test_a_definition_is_read_without_what_stands_around_it() -> None:
    """`duat explain`, the JSON Schema and a page's definitions show it alone: it begins with what the field is."""
    assert LEANING.match("of the base model")
    definitions = [entry.definition for entry in everything() if entry.kind == "field"]
    assert [one for one in definitions if LEANING.match(one)] == []


def test_the_places_of_a_field_are_real() -> None:
    """Each path leads through the JSON Schema to a property of that name."""
    for entry in everything():
        for place in entry.where if entry.kind == "field" else ():
            report, _, path = place.partition(": ")
            assert set(path.replace("[]", "").replace(".*", "").split(".")) <= schema_fields(report), place


def test_every_column_is_found_by_its_header_and_says_how_exact_it_is() -> None:
    titles = [*columns.COLUMNS, *nulls.NAMED, *columns.for_pre_activation()]
    for module in (table, verify_table, lora_table, prune_table):
        titles += [column for group in module.TABLES.values() for column in group]
    assert len(titles) > 70
    for column in titles:
        name = column.path.rpartition(".")[2]
        found = [entry for entry in named(column.name, "field") if entry.name == name]
        assert any(entry.columns for entry in found), column.name
        assert all(entry.exact for entry in found if entry.columns), column.name


def test_a_column_is_named_without_marks_of_its_lines() -> None:
    listed = {column.partition(": ")[2] for entry in everything() for column in entry.columns}
    assert "parameters" in listed
    assert {"rounds", "one round"} <= listed
    assert not [name for name in listed if name.endswith(",") or "\N{SOFT HYPHEN}" in name]


@pytest.mark.parametrize(
    ("words", "name"),
    [("idle", "negligible_share"), ("over budget, %", "share_exceeded"), ("9 of 10 at most", "percentile_90"),
     ("pred.", "mean_predicted"), ("loss base", "loss_base"), ("UAT terms at it", "tokens")],
)  # fmt: skip
def test_words_of_a_header_are_enough(words: str, name: str) -> None:
    assert name in {entry.name for entry in named(words, "field")}


def test_every_rule_and_every_lint_rule_is_explained_as_it_is_declared() -> None:
    for name, rule in all_rules().items():
        [entry] = named(name, "rule")
        assert (entry.definition, entry.facts["advice"], entry.facts["level"]) == (rule.about, rule.advice, rule.level)
    assert {e.name: e.facts["level"] for e in everything() if e.kind == "lint rule"} == LEVELS


@pytest.mark.parametrize(
    "reading",
    ["local", "frozen", "linearised", "measured", "certified", "routing", "weights", "interaction", "effective_heads"],
)
def test_a_reading_has_formula_unit_and_exactness(reading: str) -> None:
    first = named(reading, "field")[0]
    assert first.formula
    assert first.unit
    assert first.exact


def test_a_statistic_names_its_nulls() -> None:
    [entry] = [e for e in named("eff. heads", "field") if e.columns == ["inspect: eff. heads"]]
    places = ["blocks[].null.reinitialised.operator.effective_heads", "blocks[].null.uniform.operator.effective_heads"]
    assert entry.nulls == places
    assert named("spectral_norm", "field")[0].nulls == []


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("EFF.  HEADS", "effective_heads"),
        ("blocks[].operator.effective_heads", "effective_heads"),
        ("operator.effective_heads", "effective_heads"),
        ("`terms.own`", "own"),
        ("w'", "W'"),
        ("pruning", "pruning"),
        ("static", "static"),
        ("context", "effective_context"),
        ("kl", "KL"),
        ("a_h", "A_h"),
        ("UAT terms", "UAT term"),
        ("Baselines", "baseline"),
        ("prune-bound", "pruning"),
        ("check", "gate"),
    ],
)
def test_names_are_found_however_they_are_written(asked: str, name: str) -> None:
    assert explain(asked).entries[0].name == name


def test_words_come_first_then_what_a_table_prints_under_the_name() -> None:
    entries = explain("static").entries
    assert (entries[0].kind, entries[0].name) == ("word", "static")
    assert "inspect: static" in entries[1].columns
    printed = [any(column.endswith(": context") for column in entry.columns) for entry in explain("context").entries]
    assert printed == sorted(printed, reverse=True)
    assert printed[0]
    assert explain("error").entries[0].where == [
        f"{name}: blocks[].certificate_error" for name in ("inspect", "verify")
    ]


def test_every_command_opens_a_page() -> None:
    for command in {command for panel in PANELS.values() for command in panel}:
        assert explain(command).entries[0].kind == "topic", command


def test_the_mean_over_all_terms_has_an_interval_of_its_own() -> None:
    [entry] = explain("prediction[].mean_measured.value").entries
    assert "of a mean by Student's t or the studentised bootstrap" in str(entry.exact)


def test_a_name_of_several_fields_shows_each_with_its_path() -> None:
    places = [place for entry in named("output", "field") for place in entry.where]
    for path in ("modules[].alignment.output", "blocks[].terms.output", "by_prompt[].output"):
        assert f"lora-diff: {path}" in places


def test_a_wrong_name_is_answered_with_a_near_one() -> None:
    with pytest.raises(InputError, match="nearest known is 'effective_heads'"):
        explain("efective_heads")
    with pytest.raises(InputError, match=r"nearest known is 'drift\.weights'"):
        explain("drift.weigths")


def test_topics_are_no_other_name() -> None:
    """So that a topic is its page and nothing else."""
    for entry in everything():
        if entry.kind == "topic":
            assert explain(entry.name).entries == [entry]


def test_metadata_of_a_field_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Result):
        """A report of one field."""

        odd: Annotated[
            float,
            Meaning("bits", "bound", how="proved", formula="2 k + 1", source="Eq. 1", signed=True, needs="per_prompt"),
        ] = Field(description="an odd number")

    monkeypatch.setattr(fields, "REPORTS", {"odd": Odd})
    [entry] = fields.fields()
    assert (entry.definition, entry.unit, entry.exact) == ("an odd number", "bits", "bound; proved")
    assert (entry.formula, entry.source) == ("2 k + 1", "Eq. 1")
    assert entry.facts == {"sign": "may be below zero", "needs": "--per-prompt"}


def test_models_that_share_a_class_name_keep_their_own_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The means of `duat attribute` and the spreads of `duat inspect` are both of a class Spread."""

    def report(said: str) -> type[Result]:
        class Odd(Result):
            odd: int = Field(description=said)

        return Odd

    monkeypatch.setattr(fields, "REPORTS", {"one": report("an odd number"), "other": report("another number")})
    found = {entry.definition: entry.where for entry in fields.fields()}
    assert found == {"an odd number": ["one: odd"], "another number": ["other: odd"]}
    monkeypatch.undo()
    [spread] = [entry for entry in named("mean", "field") if "inspect: blocks[].spreads.*.mean" in entry.where]
    assert all(place.startswith("inspect: ") for place in spread.where)


def test_a_field_needs_what_the_groups_around_it_need_at_every_place() -> None:
    needs = {
        (entry.name, place): entry.facts.get("needs") for entry in named("share", "field") for place in entry.where
    }
    assert needs["share", "inspect: terms[].share"] == "--terms"
    assert needs["share", "inspect: blocks[].terms.own.share"] is None  # though it is in prompts[] as well
    routing = {entry.where[0]: entry.facts.get("needs") for entry in named("operator.routing", "field")}
    assert routing["lora-diff: blocks[].operator.routing"] == "--prompts"
    assert routing["compare: comparison.blocks[].operator.routing"] is None


def loaded_by(before: str = "") -> list[str]:
    """Which of the heavy libraries `duat explain` loads, in a process of its own."""
    heavy = ("torch", "transformers", "rich.markdown")
    script = (
        f"import sys, types; {before}\nfrom duat_cli.cli.main import run\n"
        "codes = {run(['explain', *line]) for line in ([], ['corr.'], ['reading'], ['drift.weights'])}\n"
        f"print('LOADED', *codes, *(name for name in {heavy!r} if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True, encoding="utf-8"
    )
    code, *loaded = done.stdout.splitlines()[-1].split()[1:]
    assert code == "0", done.stderr
    return loaded


def test_neither_torch_nor_transformers_is_loaded() -> None:
    assert loaded_by() == []


def test_that_check_can_fail() -> None:
    assert loaded_by("sys.modules['torch'] = types.ModuleType('torch')") == ["torch"]


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duat_cli.cli.terminal.libraries.calm", lambda talk: None)
    assert run(["explain", "eff.", "heads", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["command"], report["entries"][0]["name"]) == ("explain", "effective_heads")
    assert run(["explain", "nothing of that name"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("duat: error: NAME 'nothing of that name'")
    assert error.count("\n") == 1


def test_every_answer_fits_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        [],
        *([entry.name] for entry in everything() if entry.kind == "topic"),
        ["share"],
        ["corr."],
        ["adapter.config"],
    ]
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        for name in names:
            assert run(["explain", *name]) == 0
            out = capsys.readouterr().out
            assert out.endswith("\n")
            assert max(map(len, out.splitlines())) <= width, name
            assert not any(line.endswith(" ") for line in out.splitlines()), name


def test_every_criterion_of_prune_bound_is_explained() -> None:
    named = str(meaning_of(Prediction, "criteria").source)
    names = {part.partition(" (")[0].strip() for part in named.split(";")}
    assert names == {"magnitude", "activation x norm", "wanda", "taylor", "shortgpt", "angular"}
    for name in names:
        assert any(entry.definition.startswith("A criterion of duat prune-bound") for entry in explain(name).entries)
