"""Tables: golden text, and what must hold at every width.

After a wanted change: `python tests/report/test_table.py` rewrites the golden files; read their diff.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sample_reports as sample

from duat_cli.report.check.table import render_check
from duat_cli.report.tables import nulls, numbers
from duat_cli.report.tables.attribute.report import render_attribute
from duat_cli.report.tables.compare import render_compare
from duat_cli.report.tables.inspect import render_inspect
from duat_cli.report.tables.lora import render_lora
from duat_cli.report.tables.matrix import render_network
from duat_cli.report.tables.page import Page
from duat_cli.report.tables.patching import predictions
from duat_cli.report.tables.plan import render_plan
from duat_cli.report.tables.prune.report import render_prune
from duat_cli.report.tables.support import render_support
from duat_cli.report.tables.verify import render_verify
from duat_cli.results.inspect import InspectReport

GOLDEN = Path(__file__).with_name("golden")
ANSI = re.compile(r"\x1b\[[0-9;]*m")

CASES: dict[str, Callable[[Page], str]] = {
    "attribute": lambda page: render_attribute(sample.attribute_report(), page),
    "check": lambda page: render_check(sample.check_report(), page),
    "check_passed": lambda page: render_check(sample.check_report(sound=True), page),
    "compare": lambda page: render_compare(sample.compare_report(), page),
    "compare_fixed": lambda page: render_compare(sample.fixed_report(), page),
    "compare_patch": lambda page: render_compare(sample.patched_report(), page),
    "compare_patch_heads": lambda page: render_compare(sample.patched_report("heads"), page),
    "compare_patch_tokens": lambda page: render_compare(sample.patched_report("tokens"), page),
    "compare_several": lambda page: render_compare(sample.compare_report(several=True), page),
    "inspect": lambda page: render_inspect(sample.inspect_report(), page),
    "inspect_full": lambda page: render_inspect(
        sample.inspect_report(exact=False, spectrum=True, with_terms=True, per_prompt=True), page
    ),
    "inspect_one_token": lambda page: render_inspect(sample.of_one_token(sample.inspect_report()), page),
    "network": lambda page: render_network(sample.network_report(), page),
    "verify": lambda page: render_verify(sample.verify_report(), page),
    "plan": lambda page: render_plan(sample.plan_report(), page),
    "plan_none": lambda page: render_plan(sample.plan_report(limit=1 << 30), page),
    "prune": lambda page: render_prune(sample.prune_report(), page),
    "prune_criteria": lambda page: render_prune(sample.prune_report(criteria=True), page),
    "prune_repaired": lambda page: render_prune(sample.prune_report(repaired=True), page),
    "prune_joint": lambda page: render_prune(sample.prune_report(joint=True), page),
    "prune_none": lambda page: render_prune(sample.prune_report(hidden=True, nothing=True), page),
    "support": lambda page: render_support(sample.support_report(), page),
    "lora_diff": lambda page: render_lora(sample.lora_report(prompts_too=True), page),
    "lora_diff_full": lambda page: render_lora(sample.lora_report(full=True), page),
    "lora_diff_kinds": lambda page: render_lora(sample.lora_kinds(), page),
    "lora_diff_two": lambda page: render_lora(sample.lora_report(two=True), page),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, width: int) -> None:
    text = CASES[name](Page(width))
    assert text == golden(name, width).read_text(encoding="utf-8")
    assert max(map(len, text.split("\n"))) <= width
    assert "…" not in text


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [20, 33, 61, 100, 200])
def test_no_line_is_wider_than_the_page_and_nothing_is_cut(name: str, width: int) -> None:
    text = CASES[name](Page(width))
    assert max(map(len, text.split("\n"))) <= width
    assert "…" not in text


@pytest.mark.parametrize("width", [20, 45, 80, 120])
def test_no_number_of_the_report_is_lost(width: int) -> None:
    words = set(render_inspect(sample.inspect_report(spectrum=True, with_terms=True), Page(width)).split())
    for row in range(4):
        assert {f"{1.2e-07 * (row + 1):.1e}", f"{100 * (0.618 + 0.05 * row):.1f}"} <= words
    assert {"4.12", "0.412", "41.3", "19.7", "183", "43.1", "6.42", "62.0", "38.0", "101.0"} <= words


@pytest.mark.parametrize("width", [33, 45, 80])
def test_no_number_of_a_part_is_broken_between_lines(width: int) -> None:
    report = sample.attribute_report()
    measured = report.attribution[0].measured
    assert measured is not None
    text = render_attribute(report, Page(width))
    words = set(text.partition("Taken out for real")[2].partition("lost: of the logit")[0].split())
    for part in (*measured.heads, *measured.neurons):
        assert {numbers.SIGNED(part.part), numbers.SIGNED(part.change), numbers.plain(part.kl)} <= words
    for token in measured.tokens:
        assert {numbers.SIGNED(token.part), numbers.SIGNED(token.cut), numbers.SIGNED(token.replaced)} <= words


@pytest.mark.parametrize(("value", "said"), [(1.031, "0"), (1.031 * (1 - 4e-7), "0"), (1.030, "-0.00100")])
def test_a_difference_from_the_null_within_rounding_is_none(value: float, said: str) -> None:
    [block, *_] = sample.inspect_report().blocks
    operator = block.operator.model_copy(update={"effective_heads": value})
    row = block.model_copy(update={"operator": operator})
    [difference] = [column for column in nulls.NAMED if column.name == "eff. heads diff."]
    assert difference.cell(row) == said


def test_a_wide_page_has_more_columns() -> None:
    narrow, wide = (render_inspect(sample.inspect_report(), Page(width)) for width in (80, 120))
    for word in ("distance", "weighted", "struct."):
        assert word in wide.split("no room for")[0]
        assert word not in narrow.split("no room for")[0]


def test_effective_heads_stand_beside_what_they_can_be_at_most() -> None:
    report = sample.inspect_report()
    blocks = [
        block.model_copy(update={"operator": block.operator.model_copy(update={"kronecker_products": products})})
        for block, products in zip(report.blocks, (9, 9, None, 144), strict=True)
    ]
    text = render_inspect(report.model_copy(update={"blocks": blocks}), Page(120))
    assert "/9 " in render_inspect(report, Page(120))
    assert "/9-144 " in text
    assert "/9 " not in text


@pytest.mark.parametrize(("filled", "said"), [(0.506, True), (0.51, False), (None, False)])
def test_what_a_causal_mask_leaves_is_said_where_no_more_is_filled(filled: float | None, said: bool) -> None:
    report = sample.inspect_report()
    blocks = [
        block.model_copy(update={"density": block.density.model_copy(update={"structural": filled})})
        for block in report.blocks
    ]
    text = render_inspect(report.model_copy(update={"blocks": blocks}), Page(120))
    assert ("as in a causal model" in " ".join(text.split())) is said


SOME_COLUMNS = ["inspect", "inspect_full", "lora_diff", "lora_diff_full", "prune"]  # tables with columns to spare


@pytest.mark.parametrize("name", SOME_COLUMNS)
@pytest.mark.parametrize("width", [40, 61, 80, 120])
def test_columns_without_room_are_named_with_the_options_that_show_them(name: str, width: int) -> None:
    text, whole = CASES[name](Page(width)), CASES[name](Page(1000))
    assert "no room for" not in whole
    words = " ".join(text.split())
    named = re.findall(r"no room for: (.*?); --wide shows all columns, --json every value\.", words)
    first = whole.split("─" * 20)[0]  # the header of the first table
    titles = [word for group in named[:1] for column in group.split(", ") for word in column.split()]
    assert all(word.rstrip("-") in first for word in titles)
    if width <= 61:
        assert named


@pytest.mark.parametrize("name", CASES)
def test_wide_tables_have_all_columns_whatever_the_width(name: str) -> None:
    """The tables are those of a page of a thousand columns; the paragraphs keep to the page."""
    text, whole = CASES[name](Page(61, wide=True)), CASES[name](Page(1000))
    assert "no room for" not in text
    if name in SOME_COLUMNS:
        rows = [line for line in text.split("\n") if len(line) > 61]
        assert rows
        assert set(rows) <= set(whole.split("\n"))
    assert "…" not in text


@pytest.mark.parametrize("name", CASES)
def test_color_changes_no_character(name: str) -> None:
    colored = CASES[name](Page(80, color=True))
    assert "\x1b[" in colored
    plain = "\n".join(line.rstrip() for line in ANSI.sub("", colored).split("\n"))
    assert plain == CASES[name](Page(80))
    assert "\x1b" not in plain


@pytest.mark.parametrize("name", CASES)
def test_ascii_page(name: str) -> None:
    assert CASES[name](Page(80, boxes=False)).isascii()


def test_a_guarantee_is_printed_unrounded() -> None:
    """99.9 % must not become 100 %, nor 12.5 % become 12 %."""
    text = " ".join(render_prune(sample.prune_report(), Page(120)).split())
    assert (
        "neuron: with 99.9% confidence, removing 6020 of 46080 exceeds the budget on at most 12.5% of prompts" in text
    )
    assert "(1 of 83 held-out prompts did)" in text
    assert "head: none; the first set tested, 4 of the 17, exceeded the budget on 4 of 21 held-out prompts" in text
    assert "held-out prompts; 1 of 83 may" in text
    assert "ffn: none; not even the least damaging one stays within the budget" in text


def test_a_prune_report_without_ablations_of_single_terms_speaks_of_none() -> None:
    report = sample.prune_report()
    names = ("block_measured", "attention_measured", "ffn_measured")
    blocks = [b.model_copy(update=dict.fromkeys(names) | {"reasons": dict.fromkeys(names, "x")}) for b in report.blocks]
    alone = report.model_copy(
        update={"blocks": blocks, "prediction": [p.model_copy(update={"n": 0}) for p in report.prediction]}
    )
    text = " ".join(render_prune(alone, Page(120)).split())
    assert "Damage of removing one whole part, nats/token: predicted alone (--measure 0)" in text
    assert "nothing was ablated alone" in text
    for words in ("really ablated", "real ablation", "orders the measured damage", "Go by what is measured"):
        assert words not in text


def test_a_title_speaks_of_the_kinds_that_are_there() -> None:
    report = sample.prune_report()
    assert "removing one head or one neuron, nats" in render_prune(report, Page(120))
    heads = [b.model_copy(update={"neurons": None, "reasons": {**b.reasons, "neurons": "x"}}) for b in report.blocks]
    assert "removing one head, nats" in render_prune(report.model_copy(update={"blocks": heads}), Page(120))


def test_of_many_prompts_some_rows_are_printed() -> None:
    report = sample.lora_report(prompts_too=True)
    assert report.by_prompt is not None
    many = report.model_copy(update={"by_prompt": report.by_prompt * 90})
    text = render_lora(many, Page(80))
    assert len(text.splitlines()) < 110
    assert "The 40 of 90 prompts that moved most (--json has 90)" in text


def test_all_lists_what_kinds_sum_up() -> None:
    summed, listed = (render_lora(sample.lora_kinds(), Page(120, every=every)) for every in (False, True))
    assert "12 parameters in 2 kinds; --all shows a row for each parameter." in summed
    assert "layers.11.self_attn.q_proj" not in summed
    assert listed.count("layers.11.self_attn.q_proj") == 2  # of two adapters
    assert "kinds; --all" not in listed


def test_a_prune_report_without_terms_renders() -> None:
    empty = sample.prune_report().model_copy(update={"blocks": [], "plans": [], "prediction": [], "terms": []})
    assert "exact: largest relative error" in render_prune(empty, Page(80))


def test_absent_values_have_their_reason_below() -> None:
    text = render_inspect(sample.inspect_report(), Page(120))
    assert f"eff. heads, corr.: {sample.GATED} (block 2)" in text
    assert "first token: the prompts have one token each (block 1)" in text


def test_absent_values_are_those_of_the_block_or_prompt_whose_number_stands_in_their_row() -> None:
    report = sample.lora_report(prompts_too=True)
    first = (report.by_prompt or [])[0].model_copy(update={"prompt": 7, "kl": None, "reasons": {"kl": "too far"}})
    text = render_lora(report.model_copy(update={"by_prompt": [first]}), Page(200))
    assert "dynamic bias: no single linear layer (block 0)" in text
    assert "KL: too far (prompt 7)" in text


def test_an_inexact_report_warns_against_its_numbers() -> None:
    assert "exact: largest relative error 3.1e-07, against the untouched model 0, tolerance" in CASES["inspect"](Page())
    assert "NOT EXACT: largest relative error 3.2e-02" in CASES["inspect_full"](Page())


def test_foreign_strings_are_shown_and_do_nothing() -> None:
    name = "m[bold]x[/red]\x1b[2J\u202e\x9b\ny"
    report = sample.inspect_report(name=name, warnings=("[/bold] \x1b[31m",))
    text = render_inspect(report, Page(80))
    assert "m[bold]x[/red]\\x1b[2J\\u202e\\x9b\\ny" in text
    assert "- [/bold] \\x1b[31m" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_long_names_of_classes_are_cut() -> None:
    found = sample.patched_report().patched
    assert found is not None
    pair = found.pairs[0].model_copy(update={"token_a": "a" * 5000, "token_b": "b" * 5000})
    [said] = predictions(found.model_copy(update={"pairs": [pair]}))
    assert "bbb..' gains most probability, 'aaa" in said
    assert len(said) < 300


def test_a_report_without_blocks_renders() -> None:
    empty = InspectReport(**{**dict(sample.inspect_report()), "blocks": []})
    assert "no rows" in render_inspect(empty, Page(80))


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ((0.0001, None), "Idle: each alone is predicted to do less than 1 % of the budget, 0.100. Linearised"),
        ((0.3, None), "predicted to do less than 1 % of the budget, 0.100; of 1 such that were ablated 1 did more."),
        ((0.0001, 0.3), "Idle: each alone does less than 1 % of the budget, 0.100, measured."),
    ],
)
def test_idle_is_said_to_be_measured_only_where_all_were(measured: tuple[float | None, ...], said: str) -> None:
    report = sample.prune_report()
    neurons = [
        term.model_copy(update={"kind": "neuron", "linearised": 0.0002, "measured": real})
        for term, real in zip(report.terms, measured, strict=False)
    ]
    text = render_prune(report.model_copy(update={"terms": neurons}), Page(120))
    assert said in " ".join(text.split())


def golden(name: str, width: int) -> Path:
    return GOLDEN / f"{name}_{width}.txt"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case, render in CASES.items():
        for columns in (80, 120):
            golden(case, columns).write_text(render(Page(columns)), encoding="utf-8")
