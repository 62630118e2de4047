"""Prompts added up: the report does not depend on their order, and says what they say together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from helpers import quiet

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect, report_head
from duat_cli.analysis.inspect.sweep import sweep_prompts
from duat_cli.analysis.inspect.total import InspectTotal
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt

Encoded = Callable[..., list[Prompt]]
TEXTS = ("Nui zi created Nui zi dynamics", "def f(x):", "one two three one two", "def f(x):")
LAYERS = [0, 2]
SETTINGS = InspectOptions(layers=frozenset(LAYERS), terms=True, per_prompt=True, null="uniform", cache=False)


def test_the_numbers_are_the_same_in_any_order(loaded: LoadedModel, prompts: Encoded) -> None:
    encoded = prompts(loaded, *TEXTS)
    session = Session(loaded, quiet, cache=False)
    sweeps = sweep_prompts(session, encoded, SETTINGS, quiet)
    facts = prompt_facts(encoded)

    def added(order: Iterable[int]) -> Any:
        total = InspectTotal(LAYERS, terms=True, per_prompt=False)
        for k in order:
            total.add(facts[k], sweeps[k])
        report = total.report(report_head(session), session.plain_error, session.run_facts())
        return report.model_dump(exclude={"run", "prompts", "prompt_set", "certificate"})

    assert added([3, 1, 2, 0]) == added(range(4)) != added(range(3))


def test_a_block_is_the_mean_of_its_prompts(loaded: LoadedModel, prompts: Encoded) -> None:
    """Second way: from the prompts that the report lists, by the standard library."""
    report = inspect(loaded, prompts(loaded, *TEXTS), SETTINGS, quiet)
    assert [b.index for b in report.blocks] == LAYERS
    for block in report.blocks:
        assert block.prompts is not None
        assert [row.prompt for row in block.prompts] == [0, 1, 2, 3]
        rows = block.prompts
        assert block.operator.frobenius_norm == statistics.fmean(r.operator.frobenius_norm or 0 for r in rows)
        assert block.terms.own.share == statistics.fmean(r.terms.own.share or 0 for r in rows)
        assert block.certificate_error == max(r.certificate_error for r in rows)
    assert report.terms is not None
    assert abs(sum(term.share for term in report.terms) - 1) < 1e-5
