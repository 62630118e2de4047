"""`lora-diff` with pictures within a text, against plain passes of both models in float64, PEFT's own merge among them:
outputs of the blocks, KL and loss of the words alone; no loss where words see those behind them.
A video within a text is read as pictures are."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import peft
import picture_texts
import pytest
import transformers
from helpers import far
from paging import streaming
from picture_texts import VIDEO_MARK
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, no_grad

from duat_cli.api.files import lora_diff
from duat_cli.cli.main import run

AHEAD = "words that PaliGemmaForConditionalGeneration reads with a picture see those behind them"
TEXT = "USER <image> What is in the picture ?"


def made(name: str, folder: Path, **config: Any) -> tuple[Path, Path]:
    base = folder / "base"
    if name == "llava":
        picture_texts.save_llava(base)
    else:
        picture_texts.build(name).save_pretrained(base)
    fields = {"r": 2, "lora_alpha": 8, "target_modules": r".*\.(q_proj|down_proj|qkv|fc1|lm_head)"} | config
    return base, adapters.make(base, folder / "adapter", peft.LoraConfig(**fields))


def models_of(base: Path, adapter: Path) -> tuple[Any, Any]:
    own = adapters.load_base(base).double()
    return own, peft.PeftModel.from_pretrained(adapters.load_base(base).double(), adapter).merge_and_unload().double()


def passed(model: Any, given: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """The output of every block of the text, and log probabilities, (N, vocabulary)."""
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for block in picture_texts.blocks_of(model)
    ]
    with no_grad():
        logits = model(**picture_texts.doubled(given)).logits[0]
    for hook in hooks:
        hook.remove()
    return seen, logits.log_softmax(-1)


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        *((name, picture_texts.MARK) for name in picture_texts.RUNNING),
        *((name, VIDEO_MARK) for name in ("qwen2_5_vl", "qwen3_vl")),
    ],
)
def test_every_number_is_what_plain_passes_say(name: str, mark: int, tmp_path: Path) -> None:
    base, adapter = made(name, tmp_path)
    model = picture_texts.build(name)
    own = picture_texts.video_inputs(model) if mark == VIDEO_MARK else picture_texts.inputs(name, model)
    file = tmp_path / "given.safetensors"
    save_file(own, file)
    report = lora_diff(base, adapter, inputs=[str(file)], dtype="float64")
    assert report.certificate.exact
    assert report.tuned_certificate.exact
    # norms that compute in float32 round otherwise on another processor, and a KL is a difference of near logits
    rough = 1e-5 if name in ("gemma3", "paligemma") else 1e-9
    (before, p), (after, q) = (passed(model, own) for model in models_of(base, adapter))
    assert len(report.blocks) == len(before) == 3
    for block, old, new in zip(report.blocks, before, after, strict=True):
        assert block.terms.output == pytest.approx(float((new - old).norm() / old.norm()), rel=rough)
        typical = statistics.median(map(far, new.squeeze(0), old.squeeze(0)))
        assert block.terms.output_token_median == pytest.approx(typical, rel=rough)
    ids = own["input_ids"][0]
    words = [i for i, token in enumerate(ids.tolist()) if token != mark]
    each = (p.exp() * (p - q)).sum(-1)
    [prompt] = report.by_prompt
    assert prompt.kl == pytest.approx(float(each[words].mean()), rel=rough)
    for field, log in (("loss_base", p), ("loss_tuned", q)):
        if name == "paligemma":
            assert (getattr(prompt, field), prompt.reasons[field]) == (None, AHEAD)
            continue
        losses = [-float(log[i - 1, ids[i]]) for i in words if i > 0]
        assert getattr(prompt, field) == pytest.approx(sum(losses) / len(losses), rel=rough)
    assert (report.summary.loss_change is None) == (name == "paligemma")
    assert report.summary.reasons.get("loss_change") == (AHEAD if name == "paligemma" else None)
    assert not {token.position for token in prompt.moved_tokens} & (set(range(len(ids))) - set(words))
    assert prompt.moved_tokens[0].kl == pytest.approx(float(each[words].max()), rel=rough)


@pytest.mark.parametrize("name", ["llava", "paligemma", "qwen3_vl"])
def test_a_merged_checkpoint_and_weights_read_in_parts_give_the_adapter_s_numbers(name: str, tmp_path: Path) -> None:
    base, adapter = made(name, tmp_path)
    own, tuned = models_of(base, adapter)
    tuned.save_pretrained(tmp_path / "tuned")
    if name == "llava":
        transformers.AutoProcessor.from_pretrained(base).save_pretrained(tmp_path / "tuned")
    file = tmp_path / "given.safetensors"
    save_file(picture_texts.inputs(name, own), file)
    one = lora_diff(base, adapter, inputs=[str(file)], dtype="float64")
    whole = lora_diff(base, tmp_path / "tuned", inputs=[str(file)], dtype="float64")
    with streaming():
        parts = lora_diff(base, adapter, inputs=[str(file)], dtype="float64")
    for other in (whole, parts):
        for block, found in zip(one.blocks, other.blocks, strict=True):
            for field, value in block.terms.model_dump(exclude={"reasons"}).items():
                assert getattr(found.terms, field) == pytest.approx(value, rel=1e-6)
        for field in ("kl",) if name == "paligemma" else ("kl", "loss_base", "loss_tuned"):
            assert getattr(other.by_prompt[0], field) == pytest.approx(getattr(one.by_prompt[0], field), rel=1e-6)
        assert other.by_prompt[0].reasons == one.by_prompt[0].reasons
        assert (other.by_prompt[0].loss_tuned is None) == (name == "paligemma")


def test_the_words_of_a_text_are_named_and_its_pictures_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = made("llava", tmp_path)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    words = ["--image", str(tmp_path / "a.png"), "--prompt", TEXT]
    capsys.readouterr()
    assert run(["lora-diff", str(base), str(adapter), *words, "-q", "--json"]) == 0
    [prompt] = json.loads(capsys.readouterr().out)["by_prompt"]
    assert {token["text"].strip() for token in prompt["moved_tokens"]} <= {"<s>", *TEXT.split()} - {"<image>"}
    assert prompt["loss_base"] > 0
    assert run(["lora-diff", str(base), str(adapter), *words, "--out", str(tmp_path / "out"), "-q"]) == 2
    assert "--out and --image contradict each other" in capsys.readouterr().err
