"""Demonstrations in front of a question: losses and readings against the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attributing import Letters
from helpers import (
    WIRINGS,
    InDouble,
    as_loaded,
    blocks_of,
    dense_blocks,
    double_model,
    prompt_of,
    token_ids,
    two_single,
)
from torch import Tensor

from duat_cli.analysis.compare.request import Texts
from duat_cli.analysis.compare.run import CompareOptions, compare
from duat_cli.errors import InputError
from duat_cli.loading.texts import PromptText
from duat_cli.loading.words import Words
from duat_cli.results.compare.report import InContext

FIRST, BETWEEN, SECOND, QUESTION, ANSWER = 3, 1, 2, 2, 2  # tokens


def parts_of(model: Any) -> list[Tensor]:
    """A special token, two demonstrations, the second with what stands between them, the question and the answer."""
    ids = token_ids(model, 1 + FIRST + BETWEEN + SECOND + QUESTION + ANSWER, 4)
    return list(ids.split([1, FIRST, BETWEEN + SECOND, QUESTION, ANSWER], dim=1))


def joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts, dim=1)


def context_of(model: Any, *, answer: Tensor | None = None) -> InContext:
    special, one, second, question, given = parts_of(model)
    between, two = second.split([BETWEEN, SECOND], dim=1)
    given = given if answer is None else answer
    runs = [(), (one,), (two,), (one, between, two)]
    ids = [joined(special, *run, question) for run in runs]
    ids += [joined(special, *run, question, given) for run in runs]
    ids += [joined(special, *part) for part in ((one,), (two,), (one,), (one, between), (one, between, two))]
    texts = [PromptText("text", f"text {k}", k) for k in range(len(ids))]
    asked = Texts(
        texts,
        4,
        [(0, k) for k in (1, 2, 3)],
        0,
        [4, 5, 6, 7],
        {1: [(None, 8)], 2: [(None, 9)], 3: [(None, 10), (11, 12)]},
    )
    tokenizer = Letters()
    tokenizer.all_special_ids = tuple(special[0].tolist())
    options, words = CompareOptions(cache=False), Words(tokenizer)
    report = compare(as_loaded(model), asked, [prompt_of(i) for i in ids], options, words, lambda *_: None)
    assert report.context is not None
    return report.context


def test_losses_are_those_of_the_models_own_logits() -> None:
    model = two_single("llama")
    special, one, two, question, answer = parts_of(model)
    found = context_of(model)
    assert (found.question_tokens, found.answer_tokens) == (QUESTION, ANSWER)
    losses = []
    for run, demonstrations in zip(found.runs, [(), (one,), (two[:, BETWEEN:],), (one, two)], strict=True):
        ids = joined(special, *demonstrations, question, answer)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].double().log_softmax(-1)
        losses.append(-sum(float(logits[-3 + k, int(answer[0, k])]) for k in range(ANSWER)) / ANSWER)
        assert run.loss == pytest.approx(losses[-1], rel=1e-5)
        assert run.loss_change == pytest.approx(losses[-1] - losses[0], abs=1e-4)
    assert found.runs[0].bias == 0.0
    assert found.runs[0].reads == []


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_what_the_question_reads_is_that_of_the_dense_operator(model_type: str) -> None:
    model = double_model(model_type)
    special, one, two, question, _ = parts_of(model)
    with InDouble():
        found = context_of(model)
    dense = dense_blocks(model, joined(special, one, two, question), WIRINGS[model_type])
    reads = found.runs[3].reads
    assert [(read.demonstration, read.tokens) for read in reads] == [(1, FIRST), (2, SECOND)]
    columns = slice(1, 1 + FIRST), slice(1 + FIRST + BETWEEN, 1 + FIRST + BETWEEN + SECOND)
    for read, here in zip(reads, columns, strict=True):
        shares = []
        for block, W in zip(read.blocks, dense, strict=True):
            rows = blocks_of(W.W, len(W.x)).square().sum((2, 3))[-QUESTION:]
            shares.append(float(rows[:, here].sum() / rows.sum()))
            assert block.share == pytest.approx(shares[-1], rel=1e-6)
            assert block.null is not None
        assert read.share == pytest.approx(sum(shares) / len(shares), rel=1e-6)
    assert [run.reads[0].demonstration for run in found.runs[1:3]] == [1, 2]


def test_a_model_without_a_next_token_has_no_loss_and_says_so() -> None:
    found = context_of(two_single("bert"))
    assert all(run.loss is None and "no next-token model" in run.reasons["loss"] for run in found.runs)
    assert found.runs[3].reads[0].share


def test_an_answer_without_a_token_is_refused() -> None:
    model = two_single("llama")
    special = parts_of(model)[0]
    with pytest.raises(InputError, match="--answer: the tokenizer makes no token"):
        context_of(model, answer=special)
