"""Pages that look like real ones, with names and tokens that want to be markup."""

from __future__ import annotations

import functools
from collections.abc import Callable

import sample_reports as sample

from duat_cli.api.words import page_of
from duat_cli.kinds import Patched
from duat_cli.results.attribute import AttributeReport
from duat_cli.results.base import Result
from duat_cli.results.compare.report import CompareReport
from duat_cli.results.inspect import BlockMap, CouplingMap, InspectReport

EVIL = '</script><img src=x onerror="document.title=1"><b>&amp;\x1b[31m\u202e\u2028'
TOKENS = ["<s>", " the", EVIL, "'; alert(1) //", "</style>", "{{ 7*7 }}"]


def inspect_page(full: bool = True) -> InspectReport:
    """full: with everything that options add, and with maps."""
    report = sample.inspect_report(
        exact=full, spectrum=full, with_terms=full, per_prompt=full, name=EVIL, warnings=(EVIL, "{{ 7*7 }}")
    )
    return sample.of_one_token(report).model_copy(update={"maps": maps()}) if full else report


def maps() -> list[CouplingMap]:
    """Two prompts and two blocks; C of row i has i + 1 entries, as under a causal mask."""
    return [
        CouplingMap(
            prompt=prompt,
            total_tokens=9,
            tokens=TOKENS,
            blocks=[
                BlockMap(
                    index=index,
                    coupling=[
                        [round(0.01 * 3 ** (i + j * index), 4) for j in range(i + 1)] for i in range(len(TOKENS))
                    ],
                )
                for index in (0, 3)
            ],
        )
        for prompt in (0, 1)
    ]


def attribute_page() -> AttributeReport:
    """Of the sample's prediction, with hostile tokens; and the same prediction again."""
    report = sample.attribute_report()
    one = report.attribution[0]
    tokens = [token.model_copy(update={"text": EVIL}) for token in one.parts.tokens]
    evil = one.model_copy(update={"parts": one.parts.model_copy(update={"tokens": tokens})})
    return report.model_copy(update={"attribution": [evil, one], "held": [EVIL]})


def compare_page(*, several: bool) -> CompareReport:
    """Of hostile labels and texts, with three heads a block."""
    report = sample.compare_report(several=several)
    found = report.comparison
    assert found is not None
    head = found.blocks[0].heads[0]
    heads = [head.model_copy(update={"head": n, "routing": head.routing and head.routing / (n + 1)}) for n in range(3)]
    blocks = [block.model_copy(update={"heads": heads if block.heads else []}) for block in found.blocks]
    prompts = [prompt.model_copy(update={"label": EVIL}) for prompt in report.prompts]
    runs = [run.model_copy(update={"text": EVIL}) for run in report.pairs[0].runs]
    pairs = [pair.model_copy(update={"runs": runs}) for pair in report.pairs]
    comparison = found.model_copy(update={"blocks": blocks, "notable": [EVIL]})
    return report.model_copy(update={"prompts": prompts, "pairs": pairs, "comparison": comparison})


def patched_page(what: Patched) -> CompareReport:
    """Of hostile tokens."""
    report = sample.patched_report(what)
    assert report.patched is not None
    pairs = [pair.model_copy(update={"token_a": EVIL}) for pair in report.patched.pairs]
    return report.model_copy(update={"patched": report.patched.model_copy(update={"pairs": pairs})})


REPORTS: dict[str, Callable[[], list[Result]]] = {
    "inspect": lambda: [inspect_page()],
    "inspect, few options": lambda: [inspect_page(full=False)],
    "attribute": lambda: [attribute_page()],
    "check": lambda: [sample.check_report(name=EVIL)],
    "check that passed, and one that could not tell": lambda: [
        sample.check_report(sound=True),
        sample.undecided_report(name=EVIL),
    ],
    "compare": lambda: [compare_page(several=True), compare_page(several=False)],
    "compare, patches": lambda: [patched_page("blocks"), patched_page("heads"), patched_page("tokens")],
    "compare, losses": lambda: [sample.fixed_report().model_copy(update={"warnings": [EVIL]})],
    "lora-diff": lambda: [
        sample.lora_report(full=True).model_copy(update={"warnings": [EVIL]}),
        sample.lora_report(prompts_too=True, two=True).model_copy(update={"tuned": EVIL}),
    ],
    "matrix": lambda: [
        sample.matrix_report().model_copy(update={"token_texts": ["Nui", EVIL], "name": EVIL, "warnings": [EVIL]}),
        sample.matrix_report(),
    ],
    "matrix --network": lambda: [sample.network_report().model_copy(update={"deviations": [EVIL]})],
    "plan": lambda: [sample.plan_report().model_copy(update={"name": EVIL, "warnings": [EVIL]})],
    "plans of which one does not fit": lambda: [sample.plan_report(1 << 30), sample.plan_report()],
    "prune-bound": lambda: [sample.prune_report(repaired=True).model_copy(update={"warnings": [EVIL]})],
    "prune-bound --criteria": lambda: [sample.prune_report(criteria=True)],
}
"""What each page of the tests shows."""


@functools.cache
def html(name: str) -> str:
    """The page; several reports come from files of hostile names."""
    reports = REPORTS[name]()
    return page_of([(f"{EVIL}{i}.json" if len(reports) > 1 else None, report) for i, report in enumerate(reports)])
