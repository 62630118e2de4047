"""Opening a checkpoint: the order in which faults are told, and the bundled texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_session
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading import prompts
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
