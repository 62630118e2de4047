"""`lora-diff` with pictures within a text, against plain passes of both models in float64, PEFT's own merge among them:
outputs of the blocks, KL and loss of the words alone; no loss where words see those behind them.
A video within a text is read as pictures are."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import peft
import picture_texts
import pytest
from helpers import far, two_deep
from image_models import written
from paging import streaming
from picture_texts import MARK, VIDEO_MARK
from PIL import Image
from torch import Tensor, no_grad

from duat_cli.api.files import lora_diff
from duat_cli.cli.main import run
from duat_cli.results.lora import LoraReport

AHEAD = "words that PaliGemmaForConditionalGeneration reads with a picture see those behind them"
TEXT = "USER <image> What is in the picture ?"


@dataclass
class Compared:
    """A model of two blocks of text, a random adapter on it, both in float64, what they read and the report on it."""

    base: Path
    adapter: Path
    models: tuple[Any, Any]
    given: dict[int, dict[str, Tensor]]  # by the token that stands for a piece of a picture, a sound or a video
    files: list[str]
    report: LoraReport


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compared]:
    """By the model's name: made once, and only read."""

    @functools.cache
    def of(name: str) -> Compared:
        folder = tmp_path_factory.mktemp(name)
        base, adapter = made(name, folder)
        models = models_of(base, adapter)
        given = {MARK: picture_texts.inputs(name, models[0])}
        if name in ("qwen2_5_vl", "qwen3_vl"):
            given[VIDEO_MARK] = picture_texts.video_inputs(models[0])
        files = written(given.values(), folder)
        return Compared(base, adapter, models, given, files, lora_diff(base, adapter, inputs=files, dtype="float64"))

    return of


def made(name: str, folder: Path) -> tuple[Path, Path]:
    base = folder / "base"
    if name == "llava":
        picture_texts.save_llava(base)
    model = picture_texts.build(name)
    two_deep(model.get_decoder())
    model.save_pretrained(base)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=r".*\.(q_proj|down_proj|qkv|fc1|lm_head)")
    return base, adapters.make(base, folder / "adapter", config)


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


@pytest.mark.parametrize("name", picture_texts.RUNNING)
def test_every_number_is_what_plain_passes_say(name: str, compared: Callable[[str], Compared]) -> None:
    """Of Qwen-VL under a picture and under a video."""
    case = compared(name)
    report = case.report
    assert report.certificate.exact
    assert report.tuned_certificate.exact
    # norms that compute in float32 round otherwise on another processor, and a KL is a difference of near logits
    rough = 1e-5 if name in ("gemma3", "paligemma") else 1e-9
    each = [[passed(model, own) for model in case.models] for own in case.given.values()]
    assert len(report.blocks) == len(each[0][0][0])
    for k, block in enumerate(report.blocks):
        pairs = [(before[k], after[k]) for (before, _), (after, _) in each]
        want = statistics.mean(float((new - old).norm() / old.norm()) for old, new in pairs)
        assert block.terms.output == pytest.approx(want, rel=rough)
        typical = statistics.mean(statistics.median(map(far, new.squeeze(0), old.squeeze(0))) for old, new in pairs)
        assert block.terms.output_token_median == pytest.approx(typical, rel=rough)
    for prompt in report.by_prompt:
        mark, own = list(case.given.items())[prompt.prompt]
        (_, p), (_, q) = each[prompt.prompt]
        ids = own["input_ids"][0]
        words = [i for i, token in enumerate(ids.tolist()) if token != mark]
        kl = (p.exp() * (p - q)).sum(-1)
        assert prompt.kl == pytest.approx(float(kl[words].mean()), rel=rough)
        for field, log in (("loss_base", p), ("loss_tuned", q)):
            if name == "paligemma":
                assert (getattr(prompt, field), prompt.reasons[field]) == (None, AHEAD)
                continue
            losses = [-float(log[i - 1, ids[i]]) for i in words if i > 0]
            assert getattr(prompt, field) == pytest.approx(sum(losses) / len(losses), rel=rough)
        assert not {token.position for token in prompt.moved_tokens} & (set(range(len(ids))) - set(words))
        assert prompt.moved_tokens[0].kl == pytest.approx(float(kl[words].max()), rel=rough)
    assert sorted(prompt.prompt for prompt in report.by_prompt) == list(range(len(case.given)))
    assert (report.summary.loss_change is None) == (name == "paligemma")
    assert report.summary.reasons.get("loss_change") == (AHEAD if name == "paligemma" else None)


@pytest.mark.parametrize("name", ["paligemma", "qwen3_vl"])
def test_a_merged_checkpoint_and_weights_read_in_parts_give_the_adapter_s_numbers(
    name: str, compared: Callable[[str], Compared], tmp_path: Path
) -> None:
    case = compared(name)
    case.models[1].save_pretrained(tmp_path)
    whole = lora_diff(case.base, tmp_path, inputs=case.files, dtype="float64")
    with streaming():
        parts = lora_diff(case.base, case.adapter, inputs=case.files, dtype="float64")
    for other in (whole, parts):
        for block, found in zip(case.report.blocks, other.blocks, strict=True):
            for field, value in block.terms.model_dump(exclude={"reasons"}).items():
                assert getattr(found.terms, field) == pytest.approx(value, rel=1e-6)
        for mine, theirs in zip(case.report.by_prompt, other.by_prompt, strict=True):
            for field in ("kl",) if name == "paligemma" else ("kl", "loss_base", "loss_tuned"):
                assert getattr(theirs, field) == pytest.approx(getattr(mine, field), rel=1e-6)
            assert theirs.reasons == mine.reasons
            assert (theirs.loss_tuned is None) == (name == "paligemma")


def test_the_words_of_a_text_are_named_and_its_pictures_are_not(
    compared: Callable[[str], Compared], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = compared("llava")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    words = ["--image", str(tmp_path / "a.png"), "--prompt", TEXT]
    capsys.readouterr()
    assert run(["lora-diff", str(case.base), str(case.adapter), *words, "-q", "--json"]) == 0
    [prompt] = json.loads(capsys.readouterr().out)["by_prompt"]
    assert {token["text"].strip() for token in prompt["moved_tokens"]} <= {"<s>", *TEXT.split()} - {"<image>"}
    assert prompt["loss_base"] > 0
    assert run(["lora-diff", str(case.base), str(case.adapter), *words, "--out", str(tmp_path / "out"), "-q"]) == 2
    assert "--out and --image contradict each other" in capsys.readouterr().err
