"""Each prompt's share of the progress."""

from __future__ import annotations

from duat_cli.analysis.prune.steps import PASSES, Steps


def test_every_prompt_has_as_many_steps_and_the_last_ends_at_the_whole() -> None:
    said: list[tuple[int, int, str]] = []
    steps = Steps(lambda *what: said.append(what), 2, 4)
    for number in range(2):
        steps.responding([number], 9)
        steps.reading([number])
        ablated = steps.ablating([number])
        for _ in range(4):
            ablated()
    done = [one for one, _, _ in said]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == 2 * (PASSES + 4)
    assert {total for _, total, _ in said} == {done[-1]}
    assert said[6] == (7, 14, "prompt 2 of 2: responses of 9 terms")


def test_prompts_side_by_side_are_not_told_apart() -> None:
    said: list[tuple[int, int, str]] = []
    Steps(lambda *what: said.append(what), 3, 0).reading([0, 1, 2])
    assert said == [(1, 9, "3 prompts side by side: exact readings")]
