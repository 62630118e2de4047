"""Opening a checkpoint: the order in which faults are told, the bundled texts, and the prompts held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duat_cli.analysis.opening import (
    ModelRequest,
    PromptRequest,
    open_session,
    open_with_calibration,
)
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading import prompts
from duat_cli.loading.model import lengths
from duat_cli.loading.prompts import default_prompts, holdout_prompts
from duat_cli.loading.texts import PromptText


def request(model: Path | str | None, **changes: str) -> ModelRequest:
    fields = {"dtype": "float32", "device": "cpu", **changes}
    return ModelRequest(None if model is None else str(model), None, None, None, False, **fields)


class Steps(list[str]):
    """A progress that remembers what was done."""

    def __call__(self, done: int, total: int, what: str) -> None:
        self.append(what)


def test_texts_come_before_files_and_files_before_torch(checkpoint: Path) -> None:
    steps = Steps()
    loaded, found = open_session(request(checkpoint), PromptRequest(["abc"], None, 2), steps)
    assert [p.input_ids.shape for p in found] == [(1, 2)]
    assert loaded.name == str(checkpoint)
    assert steps == [
        "reading the prompts",
        f"looking for {checkpoint}",
        "loading torch and transformers",
        f"loading {checkpoint}",
    ]


def test_what_the_plan_lets_wait_reaches_the_run(checkpoint: Path) -> None:
    asked = replace(request(checkpoint), task=Task("prune-bound", pruning=PruneOptions()), memory=1 << 40)
    found = asked.find(Steps())
    way = asked.counted([900] * 900).way(found, Steps())
    assert way is not None
    assert asked.load(found, Steps(), way).waiting is None  # all weights fit
    streamed = way.model_copy(update={"weights": "streamed", "waiting_bytes": 7})
    assert asked.load(found, Steps(), streamed).waiting == 7


@pytest.mark.parametrize(
    ("model", "texts", "device", "error", "last"),
    [
        ("./nope", PromptRequest([" "], None, None), "cpu", InputError, "reading the prompts"),
        ("./nope", PromptRequest(["a"], None, None), "toaster", InputError, "loading torch for --device toaster"),
        ("./nope", PromptRequest(["a"], None, None), "cpu", CheckpointError, "looking for ./nope"),
    ],
)
def test_a_fault_is_told_before_what_takes_longer(
    model: str, texts: PromptRequest, device: str, error: type[Exception], last: str
) -> None:
    steps = Steps()
    with pytest.raises(error):
        open_session(request(model, device=device), texts, steps)
    assert steps[-1] == last


def test_a_bundled_text_that_does_not_suit_is_left_out_and_an_own_one_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [PromptText("def f():", "line 1", 1), PromptText("你好", "line 2", 2)]
    tokens = prompts._token_ids
    monkeypatch.setattr(prompts, "default_prompts", lambda: texts)
    monkeypatch.setattr(prompts, "_token_ids", lambda t, p, m: ([], None) if p.line == 2 else tokens(t, p, m))
    loaded, found = open_session(request(checkpoint), PromptRequest(None, None, None), Steps())
    assert [p.text for p in found] == ["def f():"]
    assert [w for w in loaded.warnings if "line 2" in w and w.startswith("bundled prompt left out: ")]
    with pytest.raises(InputError, match="--prompt 2: the tokenizer makes no tokens"):
        open_session(request(checkpoint), PromptRequest(["a", "b"], None, None), Steps())
    texts.pop(0)
    with pytest.raises(InputError, match="no bundled prompt suits this tokenizer, give --prompt"):
        open_session(request(checkpoint), PromptRequest(None, None, None), Steps())


def test_what_is_held_out(checkpoint: Path, tmp_path: Path) -> None:
    own, bundled = PromptRequest(["a", "b", "c", "d"], None, 3), PromptRequest(None, None, 3)

    def texts(asked: PromptRequest, holdout: str | None) -> tuple[list[str], list[str]]:
        _, chosen, apart, _ = open_with_calibration(request(checkpoint), asked, holdout, None, Steps())
        return [p.text for p in chosen], [p.text for p in apart]

    assert texts(own, None) == (["a", "b", "c", "d"], [])
    assert texts(bundled, None) == ([p.text for p in default_prompts()], [p.text for p in holdout_prompts()])
    chosen, apart = texts(own, "0.25")
    assert (len(chosen), len(apart), sorted(chosen + apart)) == (3, 1, ["a", "b", "c", "d"])
    file = tmp_path / "apart.txt"
    file.write_text("x\ny\n")
    assert texts(own, str(file)) == (["a", "b", "c", "d"], ["x", "y"])
    for share in ("0", "1", "-0.5", "nan"):
        with pytest.raises(InputError, match="expected a share between 0 and 1, or a file of prompts"):
            texts(own, share)


def test_a_text_that_cannot_be_counted_costs_the_counts_of_its_own_set_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, own = list[tuple[Sequence[int], ...]](), ModelRequest.counted

    def fails_at_x(*_: Any, **__: Any) -> Any:
        def counts(texts: Sequence[PromptText]) -> list[int]:
            if any(text.text == "x" for text in texts):
                raise InputError("the tokenizer fails")
            return [7 for _ in texts]

        return counts

    def counted(model: ModelRequest, *sets: Sequence[int], **more: int) -> ModelRequest:
        planned.append(sets)
        return own(model, *sets, **more)

    monkeypatch.setattr(lengths, "token_counter", fails_at_x)
    monkeypatch.setattr(ModelRequest, "counted", counted)
    apart, fitted = tmp_path / "apart.txt", tmp_path / "fitted.txt"
    apart.write_text("x\ny\n")
    fitted.write_text("z\n")
    asked = replace(request(checkpoint), task=Task("prune-bound", pruning=PruneOptions(exceed=0.9)))
    open_with_calibration(asked, PromptRequest(["a", "b"], None, 3), str(apart), str(fitted), Steps())
    assert planned == [([7, 7], [], [7])]


def test_too_few_held_out_prompts_are_said_before_a_checkpoint_is_looked_for() -> None:
    asked = ModelRequest("/not/there", task=Task("prune-bound", pruning=PruneOptions()))
    with pytest.raises(InputError, match="at least 29 are needed"):
        open_with_calibration(asked, PromptRequest(["a", "b"], None, None), "0.5", None, Steps())
