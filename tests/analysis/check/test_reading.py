"""`check` of models that read pictures, and of decoders: what is run, and by what a baseline knows it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import picture_texts
import pytest
import torch
from image_models import build
from PIL import Image
from pruning import save
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, ViTForImageClassification, ViTImageProcessor

import duat_cli as duat
from duat_cli.errors import InputError

Check = Callable[..., Any]
WORDS = "w3 w5 w8 w13 w2"


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    """A folder of a tiny ViT, and two pictures beside it."""
    build("vit").save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    Image.radial_gradient("L").convert("RGB").save(tmp_path / "a.png")
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "b.png")
    return tmp_path / "vit"


def rewritten(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: change(tensors[name])}, folder / "model.safetensors", {"format": "pt"})


def found(report: Any) -> dict[str, str]:
    """Rule -> what it says, of every finding."""
    return {o.rule: o.message for o in report.outcomes if o.status in ("failed", "warned")}


def skipped(report: Any) -> dict[str, str]:
    return {o.rule: o.message for o in report.outcomes if o.status == "skipped"}


def test_a_model_of_pictures_is_held_against_its_baseline(vit: Path, tmp_path: Path) -> None:
    baseline, picture = tmp_path / "b.json", tmp_path / "a.png"
    policy = tmp_path / "duat.toml"
    policy.write_text('[rules]\n"pruning.heads" = { level = "error" }\n', encoding="utf-8")
    first = duat.check(vit, image=picture, baseline=baseline, update_baseline=True, policy=policy)
    assert first.verdict == "passed"
    assert skipped(first)["pruning.heads"] == "terms are ablated where token ids alone are read"
    same = duat.check(vit, image=picture, baseline=baseline)
    assert (same.verdict, same.behaviour.predicts, same.behaviour.agreement) == ("passed", "class", 1.0)
    assert same.behaviour.kl == 0.0
    assert skipped(same)["drift.tokenizer"] == "the model reads no text here"
    with pytest.raises(InputError, match="another prompt set"):
        duat.check(vit, image=tmp_path / "b.png", baseline=baseline)
    name = next(n for n in load_file(vit / "model.safetensors") if n.endswith("layer.1.output.dense.weight"))
    rewritten(vit, name, lambda weight: weight.roll(1, 0))
    assert {"drift.weights", "behaviour.agreement"} <= found(duat.check(vit, image=picture, baseline=baseline)).keys()


def test_an_error_is_not_the_models_where_it_reads_the_picture(
    vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: object, **_named: object) -> None:
        raise RuntimeError("a fault of duat")

    monkeypatch.setattr("duat_cli.analysis.inspect.run.inspect", fails)
    with pytest.raises(RuntimeError, match=r"^a fault of duat$"):
        duat.check(vit, image=tmp_path / "a.png")


def test_another_processor_is_the_cause_and_what_it_changes_is_not_compared(vit: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"image": tmp_path / "a.png", "baseline": tmp_path / "b.json"}
    duat.check(vit, **asked, update_baseline=True)
    path = vit / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.4, 0.5, 0.5]}), encoding="utf-8")
    report = duat.check(vit, **asked)
    findings = found(report)
    assert findings["drift.config"].startswith("preprocessor_config.json: image_mean [0] 0.5 → 0.4")
    assert not findings.keys() & {"drift.operator", "behaviour.agreement", "drift.weights"}
    assert "are read otherwise" in skipped(report)["behaviour.agreement"]


def test_tensors_that_changed_for_no_stated_reason_are_a_finding(vit: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"image": tmp_path / "a.png", "baseline": tmp_path / "b.json"}
    duat.check(vit, **asked, update_baseline=True)
    held = json.loads(asked["baseline"].read_text(encoding="utf-8"))
    held["prompts"] |= {"ids": 64 * "0", "sha256": 64 * "0"}  # as another release of the processor would make them
    asked["baseline"].write_text(json.dumps(held), encoding="utf-8")
    report = duat.check(vit, **asked)
    assert report.verdict == "failed"
    assert "are read otherwise" in found(report)["drift.config"]


def test_the_class_of_a_picture_and_its_kl_are_those_of_a_plain_pass(vit: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"image": tmp_path / "a.png", "baseline": tmp_path / "b.json"}
    duat.check(vit, **asked, update_baseline=True)
    before = probabilities(vit, tmp_path / "a.png")
    names = [n for n in load_file(vit / "model.safetensors") if n.startswith("classifier.")]
    for name in names:  # what is said of the likeliest class is said of the next
        rewritten(vit, name, lambda rows: rows.roll(1, 0))
    after = probabilities(vit, tmp_path / "a.png")
    assert before.argmax() != after.argmax()
    report = duat.check(vit, **asked)
    assert {"behaviour.agreement", "behaviour.kl"} <= found(report).keys()
    assert (report.behaviour.predicts, report.behaviour.agreement) == ("class", 0.0)
    assert report.behaviour.kl == pytest.approx(float((before * (before / after).log()).sum()), rel=1e-4)


def probabilities(folder: Path, picture: Path) -> torch.Tensor:
    model: Any = ViTForImageClassification.from_pretrained(folder, dtype=torch.float64)
    pixels = ViTImageProcessor.from_pretrained(folder)(images=Image.open(picture), return_tensors="pt").pixel_values
    with torch.no_grad():
        return model(pixels.double()).logits[0].softmax(dim=-1)


def test_the_embedding_is_the_mean_of_the_model_s_own_last_hidden_states(vit: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"image": tmp_path / "a.png", "baseline": tmp_path / "b.json"}
    duat.check(vit, **asked, update_baseline=True)
    held = json.loads(asked["baseline"].read_text(encoding="utf-8"))
    held["answers"] = {"predicts": "embedding", "embeddings": held["answers"]["embeddings"]}
    held["metrics"] = {name: value for name, value in held["metrics"].items() if not name.startswith("behaviour.")}
    asked["baseline"].write_text(json.dumps(held), encoding="utf-8")  # as duat made them that asked for no classes
    same = duat.check(vit, **asked, policy="strict", select=["drift.*", "behaviour.*"])
    assert (same.verdict, found(same), same.behaviour.cosine) == ("passed", {}, 1.0)
    assert "--update-baseline adds them" in skipped(same)["behaviour.kl"]
    before = embedding(vit, tmp_path / "a.png")
    rewritten(vit, "vit.layernorm.weight", lambda gain: gain * torch.linspace(0.5, 1.5, len(gain)))
    after = embedding(vit, tmp_path / "a.png")
    behaviour = duat.check(vit, **asked).behaviour
    assert (behaviour.predicts, behaviour.agreement, behaviour.kl) == ("class", None, None)
    assert abs(behaviour.cosine - float(before @ after)) <= 4 * behaviour.cosine_error + 1e-6
    assert behaviour.cosine < 0.999


def embedding(folder: Path, picture: Path) -> torch.Tensor:
    model: Any = ViTForImageClassification.from_pretrained(folder, dtype=torch.float64)
    pixels = ViTImageProcessor.from_pretrained(folder)(images=Image.open(picture), return_tensors="pt").pixel_values
    with torch.no_grad():
        mean = model.vit(pixels.double()).last_hidden_state[0].mean(dim=0)
    return mean / mean.norm()


@pytest.mark.parametrize("memory", [None, "480MB"])
def test_a_decoder_answers_by_the_head_of_its_model(tmp_path: Path, memory: str | None) -> None:
    folder = tmp_path / "bart"
    save("bart", folder)
    limit = {} if memory is None else {"memory": int(memory.removesuffix("MB")) * 10**6}
    report = duat.check(folder, prompts=["w1 w2 w3", "w4 w9"], stack="decoder", decoder_prompt=WORDS, **limit)
    assert any("reads the tokens of --decoder-prompt" in one for one in report.warnings)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    labels = torch.tensor([tokenizer(text_target=WORDS)["input_ids"]])
    read, losses = model.prepare_decoder_input_ids_from_labels(labels=labels), []
    for text in ("w1 w2 w3", "w4 w9"):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=read).logits[0]
        losses.append(cross_entropy(logits[:-1], read[0, 1:]))
    assert report.behaviour.predicts == "next token"
    assert report.behaviour.scored == 2 * (read.shape[1] - 1)
    assert report.behaviour.loss_per_token == pytest.approx(float(sum(losses) / 2), rel=1e-5)


def test_a_baseline_is_of_one_stack_and_of_what_its_decoder_read(tmp_path: Path) -> None:
    folder, baseline = tmp_path / "bart", tmp_path / "b.json"
    save("bart", folder)
    asked: dict[str, Any] = {"prompts": ["w1 w2 w3"], "baseline": baseline}
    duat.check(folder, **asked, stack="decoder", decoder_prompt=WORDS, update_baseline=True)
    report = duat.check(folder, **asked, stack="decoder", decoder_prompt=WORDS)
    assert report.model.stack == "decoder"
    assert f"duat check {folder} --stack decoder" in report.to_model_card()
    assert ", decoder stack, " in report.to_text()
    assert (report.verdict, report.behaviour.agreement) == ("passed", 1.0)
    for other in ({}, {"stack": "decoder"}, {"stack": "decoder", "decoder_prompt": "w1"}):
        with pytest.raises(InputError, match="another prompt set"):
            duat.check(folder, **asked, **other)


def test_what_a_changed_model_writes_is_not_compared_number_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "bart"
    save("bart", folder)
    asked: dict[str, Any] = {"prompts": ["w1 w2 w3"], "baseline": tmp_path / "b.json", "stack": "decoder"}
    duat.check(folder, **asked, update_baseline=True)
    name = next(n for n in ("lm_head.weight", "model.shared.weight") if n in load_file(folder / "model.safetensors"))
    rewritten(folder, name, lambda weight: weight.roll(1, 0))
    report = duat.check(folder, **asked)
    assert found(report).keys() & {"drift.weights", "drift.tokenizer"} == {"drift.weights"}
    [said] = [o.message for o in report.outcomes if o.rule == "drift.tokenizer"]
    assert said.startswith("as in the baseline; the model writes other tokens for its decoder to read: ")
    assert skipped(report)["drift.operator"] == said.removeprefix("as in the baseline; ")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"w19"', '"other"'), encoding="utf-8")
    assert found(duat.check(folder, **asked)).keys() >= {"drift.weights", "drift.tokenizer"}


def test_in_memory_no_tokenizer_is_asked_for(vit: Path, tmp_path: Path) -> None:
    model: Any = ViTForImageClassification.from_pretrained(vit, dtype=torch.float32)
    processor: Any = ViTImageProcessor.from_pretrained(vit)
    ours, theirs = duat.check(model, processor, image=tmp_path / "a.png"), duat.check(vit, image=tmp_path / "a.png")
    assert ours.behaviour == theirs.behaviour
    assert ours.certificate == theirs.certificate


def test_a_part_that_takes_patches_without_a_batch_has_an_embedding(tmp_path: Path) -> None:
    made = picture_texts.build("qwen2_5_vl")
    made.save_pretrained(tmp_path / "qwen")
    given = picture_texts.inputs("qwen2_5_vl", made)
    tensors = {name: given[name] for name in ("pixel_values", "image_grid_thw")}
    asked: dict[str, Any] = {"inputs": tensors, "stack": "vision"}
    report = duat.check(made, **asked)
    assert report.certificate.exact
    assert (report.behaviour.predicts, report.behaviour.scored) == ("embedding", 0)
