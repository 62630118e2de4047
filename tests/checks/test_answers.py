"""Answers against those of a baseline: near ties, another token, embeddings that turned."""

from __future__ import annotations

import math

import numpy as np
import pytest

from duat_cli.checks.answers import CHANGED, NEAR_TIE, TURNED, Agreement, Answers, agreement, every
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
    same = "the most likely token is the baseline's in"
    assert found.text == f"{same} 3 of 4 predictions; 1 of the others is a near tie"
    assert of(before, tokens((8, 2.0), (9, 0.004), (3, 0.005), (4, 1.0))).text == (
        f"{same} 2 of 4 predictions; 1 of the others is a near tie"
    )
    for far in (tokens((1, 0.5), (9, 2.0), (3, 0.1), (4, 1.0)), tokens((8, 0.001), (2, 0.005), (3, 0.1), (4, 1.0))):
        assert (of(before, far).distance, of(before, far).near_ties) == (0.25, 0)


def classes(*rows: tuple[float, ...], margins: tuple[float, ...] = (), kind: str = "class") -> Answers:
    logits = np.log(rows)
    gaps = [float(np.diff(np.sort(row))[-1]) for row in logits]
    return Answers(
        predicts=kind,
        tokens=[int(np.argmax(row)) for row in rows],
        margins=margins or gaps,
        probabilities=[list(row) for row in rows],
        embeddings=[[1.0]],
    )


def test_of_two_classes_a_near_tie_is_one_by_their_logits() -> None:
    """Whose difference over their standard deviation is 2, however small it is."""
    tie = of(classes((0.501, 0.499)), classes((0.499, 0.501)))
    assert (tie.distance, tie.near_ties) == (0, 1)
    flip = of(classes((0.51, 0.49)), classes((0.49, 0.51)))
    assert (flip.distance, flip.near_ties) == (1, 0)
    assert flip.text == "the most likely class is the baseline's in 0 of 1 predictions"


@pytest.mark.parametrize("dtype", list(NEAR_TIE))
def test_the_kl_of_classes_passes_as_far_as_a_near_tie_moves_them(dtype: str) -> None:
    for share, passes in ((0.9, True), (1.1, False)):
        moved = 1 / (1 + math.exp(share * NEAR_TIE[dtype]))
        found = of(classes((0.5, 0.5)), classes((moved, 1 - moved)), dtype)
        assert found.kl == pytest.approx(-0.5 * math.log(4 * moved * (1 - moved)), rel=1e-2)
        assert (found.kl <= found.kl_allowed) == passes


def test_the_kl_is_that_of_distributions_and_not_of_their_digits() -> None:
    p, q = (0.7, 0.2, 0.1), (0.2, 0.3, 0.5)
    found = of(classes(p, q), classes(tuple(1.001 * x for x in q), q))
    assert found.kl == pytest.approx(0.5 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert of(classes(p), classes(tuple(1.0001 * x for x in p))).kl < 1e-12
    assert (
        of(classes((0.5, 0.5)), classes((0.5, 0.5)).model_copy(update={"probabilities": [[1.0, 0.0]]})).kl == math.inf
    )


def test_a_classifier_beside_a_baseline_without_classes_is_known_by_its_embedding() -> None:
    older = Answers(predicts="embedding", embeddings=[[1.0]])
    found = of(older, classes((0.9, 0.1)))
    assert (found.distance, found.error, found.kl) == (0.0, 0.0, None)
    beside = of(classes((0.9, 0.1)), classes((0.9, 0.1))).embeddings
    assert beside is not None
    assert (beside.distance, beside.error) == (0.0, 0.0)
    assert "--update-baseline" in found.without
    assert of(classes((0.9, 0.1)), older).distance == 0.0
    for other in (tokens((1, 1.0)), classes((0.9, 0.1), kind="token class")):
        said = agreement(other, classes((0.9, 0.1)), "float32")
        assert isinstance(said, str)
        assert "another thing" in said


def test_classes_without_a_kl_say_why() -> None:
    whole = classes((0.9, 0.1))
    for other, why in ((classes((0.8, 0.1, 0.1)), "over 2 classes, here over 3"), (NAN, "not finite")):
        found = of(whole, other)
        assert found.kl is None
        assert why in found.without


def test_a_baseline_holds_no_more_probabilities_than_it_says() -> None:
    assert [every(*sizes) for sizes in ((0, 1), (1024, 16), (1025, 1), (1024, 17), (16, 1000), (17, 1000))] == [
        1, 1, 2, 2, 1, 2,
    ]  # fmt: skip


NAN = Answers(predicts="class", tokens=[0], margins=[0.0], probabilities=[[]], embeddings=[[1.0]])


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
