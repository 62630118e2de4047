"""Every command that takes prompts, with --chat and with messages, on a demo that has a chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chatting import CHAT_TEMPLATE, HELLO, with_chat_template
from running_checks import few_bundled
from safetensors.torch import load_file, save_file
from short_demo import short_adapter, short_demo
from transformers import AutoModelForCausalLM

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.model.tokenizer import load_tokenizer

CHAT = ("--chat", "--prompt", "Hello")


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights without a template."""
    return short_demo(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run duat; the JSON on standard output, without its run, and the error."""

    def read(*arguments: Any, code: int = 0) -> dict[str, Any]:
        assert run([*map(str, arguments), "--json", "-q"]) == code
        made = dict(json.loads(capsys.readouterr().out, parse_constant=pytest.fail))
        made.pop("run")
        return made

    return read


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Any:
    def read(*arguments: Any) -> str:
        assert run([*map(str, arguments), "-q"]) == 2
        return capsys.readouterr().err

    return read


def tokens(folder: Path, text: str = HELLO) -> list[int]:
    return list(load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"])


def lines(file: Path, *messages: Any) -> Path:
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages), encoding="utf-8")
    return file


def test_messages_are_what_chat_makes_of_a_text(folder: Path, report: Any, tmp_path: Path) -> None:
    file = lines(tmp_path / "talks.jsonl", [{"role": "user", "content": "Hello"}])
    asked = report("inspect", folder, *CHAT)
    assert (
        asked == report("inspect", folder, "--prompts", file) == report("inspect", folder, "--prompts", file, "--chat")
    )
    assert asked["prompts"][0]["tokens"] == len(tokens(folder))
    assert asked["prompts"][0]["sha256"] != report("inspect", folder, "--prompt", HELLO)["prompts"][0]["sha256"]


def test_attribute_takes_the_first_token_of_the_answer_apart(folder: Path, report: Any) -> None:
    made = report("attribute", folder, *CHAT)["attribution"][0]
    ids = tokens(folder)
    assert made["position"] == len(ids) - 1
    assert [token["id"] for token in made["parts"]["tokens"]] == ids
    said = [token["text"] for token in made["parts"]["tokens"]]
    assert "".join(said).replace("\\n", "\n") == HELLO


def test_results_in_a_folder_are_those_of_one_run(folder: Path, report: Any, tmp_path: Path) -> None:
    said = [[{"role": "user", "content": f"the {word} one"}] for word in ("first", "second", "third")]
    prompts = ("--prompts", lines(tmp_path / "talks.jsonl", *said))
    for command in (
        ("inspect",),
        ("prune-bound", "--effort", "quick", "--granularity", "head", "--holdout", "0.4", "--exceed", "0.96"),
    ):
        asked = (command[0], folder, *command[1:], *prompts)
        kept = tmp_path / command[0]
        expected = report(*asked)
        assert report(*asked, "--out", kept) == expected
        assert report("merge", kept) == expected


def test_the_bundled_prompts_are_put_into_the_template(folder: Path, report: Any, tmp_path: Path) -> None:
    with few_bundled(3):
        plain, said = report("verify", folder), report("verify", folder, "--chat")
        kept = report("inspect", folder, "--chat", "--null", "uniform", "--out", tmp_path / "kept")
    around = len(tokens(folder)) - len(tokens(folder, "Hello"))
    more = [b["tokens"] - a["tokens"] for a, b in zip(plain["prompts"], said["prompts"], strict=True)]
    assert min(more) >= around - 3  # tokens may join where they meet the template
    assert kept["prompts"] == said["prompts"]


def test_a_plan_counts_what_the_template_writes(folder: Path, plain: Path, report: Any) -> None:
    assert report("plan", folder, *CHAT)["prompt_tokens"] == [len(tokens(folder))]
    tuned = report("plan", plain, *CHAT, "--for", "lora-diff", "--tuned", folder)
    assert tuned["prompt_tokens"] == [len(tokens(folder))]


def test_a_base_without_a_template_takes_that_of_the_tuned(
    folder: Path, plain: Path, report: Any, tmp_path: Path
) -> None:
    made = report("lora-diff", plain, folder, *CHAT)
    assert made["prompts"][0]["tokens"] == len(tokens(folder))
    again = report("lora-diff", plain, folder, *CHAT, "--out", tmp_path / "kept")
    assert again["prompts"] == made["prompts"]


def test_losses_of_what_the_model_itself_says(folder: Path, report: Any, tmp_path: Path) -> None:
    """Against plain passes in float64 over the tokens whose offsets lie in the answers."""
    tuned = tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    moved = load_file(tuned / "model.safetensors")
    moved = {name: 1.1 * value if "mlp" in name else value for name, value in moved.items()}
    save_file(moved, tuned / "model.safetensors", metadata={"format": "pt"})
    said = [
        {"role": "user", "content": "Where is Paris?"},
        {"role": "assistant", "content": "In France."},
        {"role": "user", "content": "And Rome?"},
        {"role": "assistant", "content": "In Italy, of course."},
    ]
    asked = ("lora-diff", folder, tuned, "--prompts", lines(tmp_path / "talks.jsonl", said, said[:1]))
    made = report(*asked)
    assert report(*asked, "--out", tmp_path / "kept")["summary"] == made["summary"]
    [answer, absent] = [p["answer"] for p in sorted(made["by_prompt"], key=lambda p: p["prompt"])]
    assert absent is None

    tokenizer = load_tokenizer(folder)
    text = made_text(tokenizer, said)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt")
    starts = [text.index(one["content"]) for one in said[1::2]]
    inside = [(at, at + len(one["content"])) for at, one in zip(starts, said[1::2], strict=True)]
    places = [
        k for k, (a, b) in enumerate(found["offset_mapping"][0].tolist()) if any(a < e and s < b for s, e in inside)
    ]
    models = [AutoModelForCausalLM.from_pretrained(one, dtype=torch.float64) for one in (folder, tuned)]
    ids = found["input_ids"]
    with torch.no_grad():
        p, q = (model(ids).logits[0].log_softmax(-1) for model in models)
    assert answer["tokens"] == len(places) > 10
    for name, logs in (("loss_base", p), ("loss_tuned", q)):
        expected = -sum(float(logs[k - 1, ids[0, k]]) for k in places) / len(places)
        assert answer[name] == pytest.approx(expected, rel=1e-5)
    each = (p.exp() * (p - q)).sum(-1)
    assert answer["kl"] == pytest.approx(sum(float(each[k - 1]) for k in places) / len(places), rel=1e-3)
    summary = made["summary"]["answers"]
    assert (summary["prompts"], summary["tokens"], summary["kl"]) == (1, len(places), answer["kl"])
    assert summary["loss_change"] == pytest.approx(answer["loss_tuned"] - answer["loss_base"])


def made_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """As transformers writes it, on the day of the template's clock."""
    tokenizer.chat_template = tokenizer.chat_template.replace('strftime_now("%d %b %Y")', '"26 Jul 2024"')
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def test_two_prompts_are_compared_as_conversations(folder: Path, report: Any, refusal: Any, tmp_path: Path) -> None:
    made = report("compare", folder, *CHAT, "--prompt", "Hi")
    assert [prompt["tokens"] for prompt in made["prompts"]] == [
        len(tokens(folder, HELLO.replace("Hello", said))) for said in ("Hello", "Hi")
    ]
    (tmp_path / "pairs.jsonl").write_text('{"a": "Hello", "b": "Hi"}\n', encoding="utf-8")
    pairs = report("compare", folder, "--chat", "--prompts", tmp_path / "pairs.jsonl")
    assert [prompt["sha256"] for prompt in pairs["prompts"]] == [prompt["sha256"] for prompt in made["prompts"]]
    said = refusal("compare", folder, "--chat", "--shared", "a", "--prefix", "b")
    assert "--chat: a template stands around a whole text" in said


def test_a_gate_tells_conversations_from_texts_and_sees_another_template(
    folder: Path, refusal: Any, report: Any, tmp_path: Path
) -> None:
    model, baseline = tmp_path / "model", tmp_path / "baseline.json"
    shutil.copytree(folder, model)
    asked = ("check", model, "--baseline", baseline)
    report(*asked, *CHAT, "--update-baseline")
    assert report(*asked, *CHAT)["verdict"] == "passed"
    assert "made with another prompt set" in refusal(*asked, "--prompt", "Hello")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("Today", "This day"), encoding="utf-8")
    made = report(*asked, *CHAT, code=1)["outcomes"]
    assert {one["rule"] for one in made if one["status"] == "failed"} == {"drift.tokenizer"}
    skipped = [one["message"] for one in made if one["status"] == "skipped"]
    assert any("the same prompts are read otherwise" in message for message in skipped)


def test_a_checkpoint_without_a_template_is_said_so(plain: Path, refusal: Any) -> None:
    said = "the checkpoint has no chat template (chat_template.jinja)"
    for command in ("inspect", "verify", "attribute", "check", "plan", "matrix", "prune-bound"):
        assert said in refusal(command, plain, *CHAT)
    assert said in refusal("inspect", plain, "--chat")
    assert "--chat: there are no prompts" in refusal("lora-diff", plain, plain, "--chat")


def test_results_of_another_template_are_refused(
    folder: Path, plain: Path, refusal: Any, report: Any, tmp_path: Path
) -> None:
    for number, (base, other) in enumerate(((folder, None), (plain, folder))):
        model, kept = tmp_path / f"model{number}", tmp_path / f"kept{number}"
        shutil.copytree(other or base, model)
        command = ("inspect", model, *CHAT) if other is None else ("lora-diff", base, model, *CHAT)
        report(*command, "--out", kept)
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("Today", "This day"), encoding="utf-8")
        assert "holds results of another tokenizer" in refusal(*command, "--out", kept)


def test_an_adapter_lends_its_template(plain: Path, report: Any, tmp_path: Path) -> None:
    adapter = short_adapter(tmp_path / "adapter")
    (adapter / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    assert report("lora-diff", plain, adapter, *CHAT)["prompts"][0]["tokens"] == len(tokens(plain))
    made = report("check", plain, "--adapter", adapter, *CHAT)
    assert made["prompts"][0]["tokens"] == len(tokens(plain))
