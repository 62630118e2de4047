"""A set of prompts in a line: the same whether they are listed or come one by one."""

from __future__ import annotations

import hashlib
import random

import pytest

from duat_cli.results import prompts as module
from duat_cli.results.base import PromptFacts
from duat_cli.results.prompts import FIRST, LISTED, Roll, set_of


def drawn(count: int) -> list[PromptFacts]:
    chance = random.Random(count)
    return [PromptFacts(sha256=f"{chance.getrandbits(256):064x}", tokens=chance.randint(3, 90)) for _ in range(count)]


def rolled(prompts: list[PromptFacts], *, every: bool = False) -> Roll:
    roll = Roll(every=every)
    for prompt in prompts:
        roll.add(prompt)
    return roll


@pytest.mark.parametrize("count", [1, LISTED, LISTED + 1, 5 * LISTED])
def test_a_set_is_that_of_all_its_prompts(count: int) -> None:
    """Second way: from the whole list, as baselines and model cards of earlier versions were made."""
    prompts = drawn(count)
    found = rolled(prompts).facts
    lengths = [prompt.tokens for prompt in prompts]
    assert (found.count, found.tokens) == (count, sum(lengths))
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    assert found.sha256 == hashlib.sha256("".join(f"{p.sha256}\n" for p in prompts).encode()).hexdigest()
    old = "\n".join(f"{p.sha256} {p.tokens}" for p in prompts)
    assert found.tokens_sha256 == hashlib.sha256(old.encode()).hexdigest()
    assert found == set_of(prompts) == set_of(found)


def test_only_a_large_set_is_not_listed() -> None:
    for count, listed in ((LISTED, LISTED), (LISTED + 1, FIRST), (3 * LISTED, FIRST)):
        prompts = drawn(count)
        assert rolled(prompts).listed == prompts[:listed]
        assert rolled(prompts, every=True).listed == prompts
        assert len(rolled(prompts)) == count


def test_one_prompt_more_or_in_another_order_is_another_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTED", 2)
    prompts = drawn(20)
    longer = [*prompts[:-1], prompts[-1].model_copy(update={"tokens": prompts[-1].tokens + 1})]
    others = [longer, prompts[:-1], [*prompts[:18], prompts[19], prompts[18]]]
    assert len({set_of(one).tokens_sha256 for one in (prompts, *others)}) == 4
    assert set_of(longer).sha256 == set_of(prompts).sha256
