"""Sentences on what a change of weights does to prompts."""

from __future__ import annotations

import sample_reports

from duat_cli.analysis.lora.notable import most_moved
from duat_cli.results.lora import BlockChange


def test_routing_and_weights_are_said_of_all_blocks() -> None:
    first = (sample_reports.lora_report(prompts_too=True).blocks or [])[0]
    operator = first.operator.model_copy(update={"relative_change": 0.5, "routing": 0.4, "weights": 0.2})
    second = BlockChange(**{**first.model_dump(), "index": 1, "operator": operator.model_dump()})
    assert most_moved([first, second]) == [
        "W' of block 1 changed most, by 50 %; routing (what attention looks at) changed it by 12 to 40 % a block, "
        "weights (what it carries) by 20 to 27 %, routing more in 1 of 2; what FFNs add changed by 20 %"
    ]
