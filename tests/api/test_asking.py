"""Pictures, sounds and stacks from Python: of a folder as the command has them, of a model in memory as its folder."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bad_checkpoints
import numpy as np
import pytest
import torch
import transformers as t
from image_models import SMALL, WHISPER
from picture_texts import save_llava
from PIL import Image

import duat_cli as duat
from duat_cli.cli.main import run
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.zoo.tiny import tiny_model


@dataclass
class Models:
    """Folders of tiny models, a picture and a sound."""

    root: Path

    def __getitem__(self, name: str) -> Path:
        return self.root / name

    def held(self, name: str, cls: Any) -> Any:
        return cls.from_pretrained(self[name])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(4)
    t.ViTForImageClassification(t.ViTConfig(**SMALL)).save_pretrained(root / "vit")
    t.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(root / "vit")
    t.WhisperForConditionalGeneration(t.WhisperConfig(**WHISPER)).save_pretrained(root / "whisper")
    bad_checkpoints.tokenizer(root / "whisper")
    t.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=500).save_pretrained(root / "whisper")
    text = {key: SMALL[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size")}
    text |= {"num_hidden_layers": 1, "vocab_size": 264, "max_position_embeddings": 20}
    clip = t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=SMALL, projection_dim=8))
    clip.save_pretrained(root / "clip")
    bad_checkpoints.tokenizer(root / "clip")
    t.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(root / "clip")
    pixels = np.random.default_rng(1).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "a.png")
    with wave.open(str(root / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((np.sin(np.arange(9000) / 7) * 9000).astype("<i2").tobytes())
    return Models(root)


def said(report: Any) -> Any:
    """All but what differs between two runs."""
    return {name: value for name, value in json.loads(report.to_json()).items() if name != "run"}


def test_a_picture_of_a_folder_is_the_commands(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    report = duat.inspect(models["vit"], image=models["a.png"], null="uniform", maps=1)
    words = [str(models["vit"]), "--image", str(models["a.png"]), "--null", "uniform", "--maps", "1"]
    capsys.readouterr()
    assert run(["inspect", *words, "--json", "-q"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert said(report) == {name: value for name, value in expected.items() if name != "run"}
    assert report.prompts[0].tokens == 17
    assert report.certificate.relative_error < 1e-5


@pytest.mark.parametrize("form", ["file", "picture", "list", "tensors", "tensors alone"])
def test_a_picture_in_memory_is_that_of_the_folder(form: str, models: Models) -> None:
    model = models.held("vit", t.ViTForImageClassification)
    processor, picture = t.AutoImageProcessor.from_pretrained(models["vit"]), Image.open(models["a.png"])
    made = processor(images=picture, return_tensors="pt")
    given: dict[str, dict[str, Any]] = {
        "file": {"tokenizer": processor, "image": models["a.png"]},
        "picture": {"tokenizer": processor, "image": picture},
        "list": {"tokenizer": processor, "image": [str(models["a.png"])]},
        "tensors": {"tokenizer": processor, "inputs": made},
        "tensors alone": {"inputs": [dict(made)]},
    }
    report = duat.verify(model, **given[form])
    expected = duat.verify(models["vit"], image=models["a.png"])
    assert (report.blocks, report.prompts) == (expected.blocks, expected.prompts)
    assert report.model.fingerprint == expected.model.fingerprint


def test_the_operator_of_a_picture_is_what_attention_adds(models: Models) -> None:
    model = models.held("vit", t.ViTForImageClassification)
    processor, seen = t.AutoImageProcessor.from_pretrained(models["vit"]), list[torch.Tensor]()
    operator = duat.verify(model, processor, image=models["a.png"]).operator(block=1)
    attention = model.vit.layers[1].attention
    with torch.no_grad(), attention.register_forward_hook(lambda m, a, out: seen.append(out[0])):
        model(**processor(images=Image.open(models["a.png"]), return_tensors="pt"))
    constant = attention.o_proj(attention.v_proj.bias)  # rows of H sum to 1
    assert torch.allclose(operator.contribution, seen[0][0] - constant, atol=1e-5)
    assert operator.tokens == [f"#{position}" for position in range(17)]


@pytest.mark.parametrize("stack", [None, "decoder"])
def test_a_sound_in_memory_is_that_of_the_folder(stack: Any, models: Models) -> None:
    folder, words = models["whisper"], {} if stack is None else {"decoder_prompt": "ab"}
    parts = t.AutoFeatureExtractor.from_pretrained(folder), t.AutoTokenizer.from_pretrained(folder)
    processor = t.WhisperProcessor(*parts)
    model = models.held("whisper", t.WhisperForConditionalGeneration)
    asked: dict[str, Any] = {"audio": models["a.wav"], "stack": stack, **words}
    report, expected = duat.verify(model, processor, **asked), duat.verify(folder, **asked)
    assert (report.blocks, report.prompts) == (expected.blocks, expected.prompts)
    assert report.certificate.relative_error < 1e-5
    assert report.model.stack == (stack or "encoder")


@pytest.mark.parametrize(("stack", "given"), [("vision", {"image": "a.png"}), ("text", {"prompts": "ab"})])
def test_a_part_in_memory_is_that_of_the_folder(stack: Any, given: dict[str, str], models: Models) -> None:
    asked: dict[str, Any] = {n: models[v] if n == "image" else v for n, v in given.items()}
    kind = t.AutoImageProcessor if stack == "vision" else t.AutoTokenizer
    own = kind.from_pretrained(models["clip"])
    report = duat.verify(models.held("clip", t.CLIPModel), own, stack=stack, **asked)
    expected = duat.verify(models["clip"], stack=stack, **asked)
    assert (report.blocks, report.prompts) == (expected.blocks, expected.prompts)
    assert report.model.stack == stack


def test_a_picture_stands_in_the_texts_of_a_file(tmp_path: Path) -> None:
    save_llava(tmp_path)
    file, image = tmp_path / "mine.txt", Image.new("RGB", (20, 20), (200, 80, 10))
    file.write_text("USER <image> a cat\n<image> What is a cat ?\n", encoding="utf-8")
    model = t.LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager")
    held = duat.verify(model, t.AutoProcessor.from_pretrained(tmp_path), prompts_file=file, image=image)
    stored = duat.verify(tmp_path, prompts_file=file, image=image)
    assert [prompt.tokens for prompt in held.prompts] == [3 + 16, 5 + 16]
    assert [prompt.sha256 for prompt in held.prompts] == [prompt.sha256 for prompt in stored.prompts]


def test_a_text_with_a_picture_is_attributed_as_by_the_command(
    tmp_path: Path, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llava(tmp_path)
    text, picture = "USER <image> a cat", models["a.png"]
    model = t.LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager")
    held = duat.attribute(model, t.AutoProcessor.from_pretrained(tmp_path), prompts=text, image=picture)
    stored = duat.attribute(tmp_path, prompts=text, image=picture)
    capsys.readouterr()
    assert run(["attribute", str(tmp_path), "--prompt", text, "--image", str(picture), "--json", "-q"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert said(stored) == {name: value for name, value in expected.items() if name != "run"}
    assert said(held)["attribution"] == expected["attribution"]
    assert stored.attribution[0].parts.picture.positions == 16


def test_a_decoder_is_attributed(models: Models) -> None:
    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    ends = {"decoder_start_token_id": 259, "pad_token_id": 259, "eos_token_id": 257}
    model = t.T5ForConditionalGeneration(t.T5Config(vocab_size=264, **sizes, **ends)).eval()
    tokenizer = t.AutoTokenizer.from_pretrained(models["whisper"])
    report = duat.attribute(model, tokenizer, prompts="abc", stack="decoder", decoder_prompt="xy")
    ids = torch.tensor([tokenizer("abc")["input_ids"]])
    decoded = torch.tensor([[259, *tokenizer(text_target="xy")["input_ids"][:-1]]])
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=decoded).logits[0, -1]
    assert report.attribution[0].logit == pytest.approx(float(logits.max()), rel=1e-5)
    assert len(report.attribution[0].parts.encoder.tokens) == 3


IDS = [[5, 9, 9, 7, 5, 9], [8, 4, 6, 6, 5, 3]]


@pytest.fixture
def gpt2() -> Any:
    return tiny_model("gpt2")


def test_token_ids_are_what_the_model_reads(gpt2: Any) -> None:
    """Of a model in memory without a tokenizer, against a plain pass of the model."""
    report = duat.attribute(gpt2, prompts=IDS, target="#7", measure=1)
    for ids, one in zip(IDS, report.attribution, strict=True):
        with torch.no_grad():
            assert one.logit == pytest.approx(float(gpt2(torch.tensor([ids])).logits[0, -1, 7]), rel=1e-5)
        assert [token.text for token in one.parts.tokens] == [f"#{i}" for i in ids]
    assert report.certificate.exact
    with torch.no_grad():
        logs = gpt2(torch.tensor([[*IDS[0], 7, 3]])).logits[0].double().log_softmax(-1)
    [continued] = duat.attribute(gpt2, prompts=IDS[:1], continuation="#7 #3").continuations
    assert continued.log_probability == pytest.approx(float(logs[5, 7] + logs[6, 3]), rel=1e-5)


def test_every_function_takes_token_ids(gpt2: Any) -> None:
    report = duat.inspect(gpt2, prompts=torch.tensor(IDS), null="uniform")
    assert [prompt.tokens for prompt in report.prompts] == [6, 6]
    assert report.operator(1, 0).input_ids.tolist() == IDS[1]
    assert duat.verify(gpt2, prompts=IDS, max_tokens=3).prompts[0].tokens == 3
    assert duat.prune_bound(gpt2, prompts=IDS, granularity="head", measure=2, probes=4).certificate.exact
    assert duat.compare(gpt2, prompts=IDS).certificate.exact
    assert duat.compare_fixed(gpt2, prompts=IDS).certificate.exact
    assert duat.check(gpt2, prompts=IDS, policy="default").certificate is not None
    assert duat.matrix(gpt2, prompt=IDS[0]).certificate.exact


def test_token_ids_are_those_of_their_texts() -> None:
    tokenizer, texts = t.AutoTokenizer.from_pretrained(demo_path()), ["The cat sat.", "def main():"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert duat.verify(prompts=ids).blocks == duat.verify(prompts=texts).blocks
    tokens = duat.attribute(prompts=ids[:1], max_tokens=3).attribution[0].parts.tokens
    assert "".join(token.text for token in tokens) == "<s>The c"
    assert duat.plan(prompts=ids).prompt_tokens == [len(one) for one in ids]


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda m: duat.verify(m, prompts=[[1, 99999]]), r"prompts\[0\]: token id 99999 is out of the vocabulary"),
        (lambda m: duat.verify(m, prompts=[[1], [-1]]), r"prompts\[1\]: token id -1 is out of the vocabulary"),
        (
            lambda m: duat.verify(m, prompts=[[]]),
            r"prompts\[0\]: expected a text, or token ids, one whole number at least; got list",
        ),
        (lambda m: duat.verify(m, prompts=[[1.5]]), "one whole number at least; got list of float"),
        (lambda m: duat.verify(m, prompts=torch.tensor([1, 2])), "a text or token ids, got Tensor"),
        (lambda m: duat.verify(m, prompts=[b"ab"]), "a text or token ids, got bytes"),
        (lambda m: duat.verify(m, prompts=["a", [1]]), "texts and token ids; give all of them in one way"),
        (lambda m: duat.verify(m, prompts=["a"]), "tokenizer missing"),
        (lambda m: duat.verify(m, prompts=[[1]], image="a.png"), "--image: stands in a text, not among token ids"),
        (lambda m: duat.attribute(m, prompts=[[1]], target="x"), "--target: a text, but there is no tokenizer"),
        (
            lambda m: duat.attribute(m, prompts=[[1]], continuation="x"),
            "--continuation: a text, but there is no tokenizer",
        ),
        (lambda m: duat.compare(m, shared="a", prefixes=["b"]), "tokenizer missing"),
    ],
)
def test_what_no_token_ids_can_be_is_one_line(call: Callable[[Any], Any], wrong: str, gpt2: Any) -> None:
    with pytest.raises(duat.InputError, match=wrong):
        call(gpt2)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda m, p: duat.verify(m, p, prompts=["x"]), "reads no token ids here; give --image"),
        (lambda m, p: duat.verify(m, image="a.png"), "--image a.png: no such file"),
        (lambda m, p: duat.verify(m, image=Image.new("RGB", (9, 9))), "--image: no processor was given"),
        (lambda m, p: duat.verify(m, p, image=3), r"image\[0\]: expected a file or a PIL picture, got int"),
        (lambda m, p: duat.verify(m, p, audio=[b"x"]), r"audio\[0\]: expected a .wav file, got bytes"),
        (lambda m, p: duat.verify(m, p, audio="x.wav"), "ViTForImageClassification reads images, no sound"),
        (lambda m, p: duat.verify(m, inputs={"pixel_values": "x"}), r"--inputs 1 \(dict\): it holds what is no tensor"),
        (lambda m, p: duat.verify(m, inputs={"pixels": torch.ones(1)}), "pixels: ViTForImageClassification takes no"),
        (lambda m, p: duat.verify(m, p, stack="text"), "has no part that reads input_ids"),
        (lambda m, p: duat.verify(m, p, stack="decoder"), "is no encoder with a decoder"),
        (lambda m, p: duat.verify(stack="all"), "stack 'all': expected None, vision"),
        (lambda m, p: duat.verify(image=Image.new("RGB", (9, 9))), "LlamaForCausalLM reads token ids here"),
        (lambda m, p: duat.matrix(m, p, image=[Image.new("RGB", (9, 9))] * 2), "a matrix belongs to one input"),
        (lambda m, p: duat.matrix(m, p, prompt="x"), "reads no token ids here"),
        (lambda m, p: duat.matrix(stack="decoder"), "is no encoder with a decoder"),
        (lambda m, p: duat.matrix(stack="L_module"), "stack 'L_module': expected None, vision"),
        (lambda m, p: duat.compare(stack="L_module"), "stack 'L_module': expected None, vision"),
        (lambda m, p: duat.attribute(m, p, prompts="x"), r"takes `pixel_values` \(images\), no token ids"),
        (lambda m, p: duat.attribute(m, p, image=Image.new("RGB", (9, 9))), r"\(images\), no token ids"),
        (lambda m, p: duat.attribute(stack="encoder"), "stack 'encoder': expected None, decoder"),
        (lambda m, p: duat.attribute(decoder_prompt="x"), "--decoder-prompt: only a decoder reads it"),
    ],
)
def test_what_is_given_wrong_is_one_line(call: Callable[[Any, Any], Any], wrong: str, models: Models) -> None:
    model = t.ViTForImageClassification(t.ViTConfig(**SMALL))
    with pytest.raises(duat.DuatError, match=wrong) as refused:
        call(model, t.ViTImageProcessor(size={"height": 16, "width": 16}))
    assert "\n" not in str(refused.value)


def test_memory_is_bytes() -> None:
    with pytest.raises(duat.DuatError, match="memory: '8GB': expected bytes, a whole number"):
        duat.verify(prompts=["x"], memory="8GB")  # type: ignore[arg-type]
