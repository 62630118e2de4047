"""The page of coverage: its form, and whether it says what the installed transformers gives."""

from __future__ import annotations

import coverage_page
import pytest
import sample_reports as sample
import transformers
from coverage_page import statuses
from coverage_text import coverage, mechanism, status_of

from duat_cli.analysis.support import entry_of_type
from duat_cli.results.support import StackEntry
from duat_cli.zoo import tiny

ONE_EACH = ["rwkv", "swin", "clip"]


def test_every_type_stands_under_its_status() -> None:
    report = sample.support_report()
    stacks = [StackEntry(stack=name, status="exact", reason=None) for name in ("encoder", "decoder")]
    first = report.entries[0].model_copy(update={"stacks": stacks})
    report = report.model_copy(update={"entries": [first, *report.entries[1:]]})
    page = coverage(report)
    assert statuses(page) == {entry.model_type: status_of(entry) for entry in report.entries}
    assert f"- `encoder` and `decoder`: {first.model_type}\n" in page
    assert all(len(line) <= 120 for line in page.splitlines())


def test_a_mechanism_has_no_names_of_one_model() -> None:
    assert mechanism("layers.3: with its parameters frozen it is not affine (relative error 2.0e-01)") == (
        "a block: with its parameters frozen it is not affine"
    )
    assert mechanism("encoder.stages.0.layers.1: not affine") == "a block: not affine"
    assert mechanism("RwkvForCausalLM: no attention") == "no attention"
    assert mechanism("decoder: layers.0: not affine") == "decoder: a block: not affine"
    assert mechanism("not tried: ImportError: X requires the timm library but it was not found") == (
        "its code needs the library timm"
    )
    assert (
        mechanism("not tried: no made-up `states` suits it: y") == "nothing that could be made up suits it as `states`"
    )
    assert mechanism("operator of block 0, 1: residual of 4.1e-01") == "operator of a block: residual"


def test_the_page_is_current() -> None:
    """Written anew by scripts/coverage.py: every text type of this transformers is on it, none that it lacks, and some
    are as they say. Which others have a class is known only once all their files are imported."""
    found = coverage_page.current()
    if found is None:
        pytest.skip(f"the page is not of transformers {transformers.__version__}")
    assert set(tiny.text_model_types()) <= set(found) <= set(transformers.CONFIG_MAPPING)
    for name in ONE_EACH:
        assert found[name] == status_of(entry_of_type(name)), name
