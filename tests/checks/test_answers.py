"""Answers against those of a baseline: near ties, another token, embeddings that turned."""

from __future__ import annotations

import numpy as np
import pytest

from duat_cli.checks.answers import CHANGED, TURNED, Agreement, Answers, agreement
from duat_cli.checks.sketch import Sketch


def tokens(*pairs: tuple[int, float]) -> Answers:
    return Answers(predicts="next token", tokens=[t for t, _ in pairs], margins=[m for _, m in pairs])


def of(before: Answers, now: Answers, dtype: str = "float32") -> Agreement:
    found = agreement(before, now, dtype)
    assert isinstance(found, Agreement)
    return found


def test_a_near_tie_counts_as_the_same_where_both_runs_are_near_it() -> None:
    before = tokens((1, 0.5), (2, 0.005), (3, 0.005), (4, 1.0))
    assert of(before, before).distance == 0
    found = of(before, tokens((1, 0.5), (9, 0.004), (3, 0.005), (4, 1.0)))
    assert (found.distance, found.near_ties) == (0, 1)
    for far in (tokens((1, 0.5), (9, 2.0), (3, 0.1), (4, 1.0)), tokens((8, 0.001), (2, 0.005), (3, 0.1), (4, 1.0))):
        assert (of(before, far).distance, of(before, far).near_ties) == (0.25, 0)


def test_half_precision_may_turn_more() -> None:
    before, now = tokens((1, 0.1)), tokens((2, 0.15))
    assert of(before, now, "float32").distance == 1
    assert of(before, now, "bfloat16").distance == 0
    assert CHANGED["float32"] == 0 < CHANGED["float16"] < CHANGED["bfloat16"]


@pytest.mark.parametrize(
    ("before", "now", "word"),
    [
        (tokens((1, 1.0)), tokens((1, 1.0), (2, 1.0)), "holds 1 predictions"),
        (tokens(), tokens(), "nothing"),
        (tokens((1, 1.0)), Answers(predicts="embedding", embeddings=[[1.0]]), "another thing"),
        (Answers(predicts="embedding", embeddings=[[1.0]]), Answers(predicts="embedding"), "holds 1 embeddings"),
        (
            Answers(predicts="embedding", embeddings=[[1.0]]),
            Answers(predicts="embedding", embeddings=[[1.0, 2.0]]),
            "embeddings",
        ),
    ],
)
def test_what_cannot_be_compared_says_why(before: Answers, now: Answers, word: str) -> None:
    found = agreement(before, now, "float32")
    assert isinstance(found, str)
    assert word in found


def sketches(rows: np.ndarray) -> Answers:
    found = []
    for number, row in enumerate(rows):
        sketch = Sketch()
        sketch.add(sketch.products((row / np.linalg.norm(row))[None], number, 0), number)
        found.append([float(value) for value in sketch.sums])
    return Answers(predicts="embedding", embeddings=found)


@pytest.mark.parametrize("far", [0.0, 0.01, 0.3, 3.0])
def test_the_cosine_is_the_true_one_within_its_error(far: float) -> None:
    noise = np.random.default_rng(5)
    before = noise.standard_normal((40, 384))
    now = before + far * noise.standard_normal((40, 384))
    sizes = np.linalg.norm(before, axis=1) * np.linalg.norm(now, axis=1)
    true = float(np.mean(np.sum(before * now, axis=1) / sizes))
    found = of(sketches(before), sketches(now))
    assert found.error is not None
    assert abs((1 - found.distance) - true) <= 4 * found.error + 1e-12
    assert found.error <= 0.13 * (1 - true) + 1e-12  # half of 1 - cosine, over 40 prompts
    assert (found.distance <= TURNED["float32"]) == (far == 0.0)
