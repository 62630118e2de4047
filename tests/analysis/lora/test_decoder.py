"""Base and tuned model by their decoders, each behind its own encoder, against PEFT's merge in float64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import bad_checkpoints
import image_models
import pytest
import torch
from decoders import BART, T5, carried, dense_crossing
from paging import streaming
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, no_grad
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    BartForConditionalGeneration,
    T5ForConditionalGeneration,
)

from duat_cli.api.files import lora_diff
from duat_cli.errors import InputError
from duat_cli.results.lora import LoraReport, PromptChange

TEXTS, OWN = ["abcdef", "hello"], "world wide"
MODELS: dict[str, tuple[Any, list[str]]] = {
    "t5": (lambda: T5ForConditionalGeneration(T5), ["q", "v", "wi", "wo"]),
    "bart": (lambda: BartForConditionalGeneration(BART), ["q_proj", "v_proj", "fc1", "fc2"]),
}


def adapter_on(model: Any, layers: list[str], folder: Path) -> None:
    """Writes a random adapter on these layers of both stacks."""
    torch.manual_seed(5)
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
    with no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.5)
    tuned.save_pretrained(folder)


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base, an adapter on it, and the two merged by PEFT."""
    root, (make, layers) = tmp_path_factory.mktemp(request.param), MODELS[request.param]
    torch.manual_seed(3)
    make().save_pretrained(root / "base")
    for folder in ("base", "merged"):
        bad_checkpoints.tokenizer(root / folder)
    adapter_on(AutoModelForSeq2SeqLM.from_pretrained(root / "base"), layers, root / "adapter")
    base = AutoModelForSeq2SeqLM.from_pretrained(root / "base").double()
    PeftModel.from_pretrained(base, root / "adapter").merge_and_unload().save_pretrained(root / "merged")
    return root / "base", root / "adapter", root / "merged"


@functools.cache
def outputs(folder: Path, text: str) -> tuple[Any, Tensor]:
    """The whole model's own output for a text, and the tokens that its decoder read."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = torch.tensor([tokenizer(text_target=OWN)["input_ids"]])
    own = model.prepare_decoder_input_ids_from_labels(labels=labels)
    with no_grad():
        return model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]), decoder_input_ids=own, use_cache=False,
                     output_hidden_states=True), own  # fmt: skip


def require(change: PromptChange, before: Any, after: Any, own: Tensor) -> None:
    """The change of a prompt is that of two outputs of whole models."""
    p, q = (one.logits[0].double().log_softmax(-1) for one in (before, after))
    assert change.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-6)
    for loss, one in ((change.loss_base, before), (change.loss_tuned, after)):
        assert loss == pytest.approx(float(cross_entropy(one.logits[0, :-1].double(), own[0, 1:])), rel=1e-9)


def compared(base: Path, tuned: Path, **more: Any) -> LoraReport:
    return lora_diff(base, tuned, prompts=TEXTS, stack="decoder", decoder_prompt=OWN, dtype="float64", **more)


@pytest.fixture(scope="module")
def reports(pair: tuple[Path, Path, Path]) -> dict[str, LoraReport]:
    """By what the base is compared with: made once, and only read."""
    base, adapter, merged = pair
    return {"adapter": compared(base, adapter), "merged": compared(base, merged)}


@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_the_prediction_is_that_of_whole_models(
    pair: tuple[Path, Path, Path], reports: dict[str, LoraReport], way: str
) -> None:
    (base, _, merged), report = pair, reports[way]
    assert report.certificate is not None
    assert report.tuned_certificate is not None
    assert report.certificate.exact
    assert report.tuned_certificate.exact
    moved = []
    for change in report.by_prompt:
        (before, own), (after, _) = (outputs(folder, TEXTS[change.prompt]) for folder in (base, merged))
        require(change, before, after, own)
        old, new = (one.decoder_hidden_states[-2][0] for one in (before, after))
        moved.append(float((new - old).norm() / old.norm()))
    assert report.blocks[-2].terms.output == pytest.approx(sum(moved) / len(moved), rel=1e-6)
    assert report.eq18 is not None
    assert report.eq18.holds
    assert any("EncDecAttention" in name or "encoder_attn" in name for name in report.eq18.through_attention)
    assert all(name.removeprefix("model.").startswith("encoder.") for name in report.eq18.elsewhere)


@pytest.mark.parametrize("way", ["adapter", "merged"])
@no_grad()
def test_cross_attention_moves_as_dense_matrices_say(
    pair: tuple[Path, Path, Path], reports: dict[str, LoraReport], way: str
) -> None:
    """In T5 it adds to the stream as it is, so that its W'_c is sum_h H_c,h (x) (V_h O_h)^T."""
    (base, _, merged), report = pair, reports[way]
    assert all(block.cross and block.cross.relative_change for block in report.blocks)
    eager = {"attn_implementation": "eager"}
    models = [AutoModelForSeq2SeqLM.from_pretrained(one, **eager).double() for one in (base, merged)]
    if models[0].config.model_type != "t5":  # BART's norm behind it scales its rows
        return
    tokenizer = AutoTokenizer.from_pretrained(base)
    own = models[0].prepare_decoder_input_ids_from_labels(torch.tensor([tokenizer(text_target=OWN)["input_ids"]]))
    for block in report.blocks:
        modules = [model.decoder.block[block.index].layer[1].EncDecAttention for model in models]
        A, after = map(carried, modules)
        found: dict[str, list[float]] = {"relative_change": [], "routing": [], "weights": [], "interaction": []}
        for text in TEXTS:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            H, moved = (
                model(input_ids=ids, decoder_input_ids=own, output_attentions=True).cross_attentions[block.index][0]
                for model in models
            )
            whole = dense_crossing(H, A)
            parts = {
                "relative_change": dense_crossing(moved, after) - whole,
                "routing": dense_crossing(moved - H, A),
                "weights": dense_crossing(H, after - A),
                "interaction": dense_crossing(moved - H, after - A),
            }
            for name, part in parts.items():
                found[name].append(float(part.norm() / whole.norm()))
        for name, values in found.items():
            assert getattr(block.cross, name) == pytest.approx(sum(values) / len(values), rel=1e-6), name


def test_blocks_read_one_by_one_give_the_same(pair: tuple[Path, Path, Path], reports: dict[str, LoraReport]) -> None:
    (base, adapter, _), resident = pair, reports["adapter"]
    with streaming():
        streamed = compared(base, adapter)
    assert resident.blocks == streamed.blocks
    assert resident.by_prompt == streamed.by_prompt
    assert resident.eq18 == streamed.eq18


def test_a_decoder_of_sound(tmp_path: Path) -> None:
    """What the base writes is read by both."""
    base = image_models.build("whisper")
    base.save_pretrained(tmp_path / "base")
    adapter_on(base, ["q_proj", "v_proj", "fc1"], tmp_path / "adapter")
    base = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "base").double().eval()
    given = image_models.CASES["whisper"][1]()
    save_file(given, tmp_path / "one.safetensors")
    report = lora_diff(
        tmp_path / "base", tmp_path / "adapter", inputs=tmp_path / "one.safetensors", stack="decoder", dtype="float64"
    )
    sound = {key: value.double() for key, value in given.items()}
    start = torch.tensor([[base.generation_config.decoder_start_token_id or base.config.decoder_start_token_id]])
    with no_grad():
        own = base.generate(**sound, do_sample=False, num_beams=1, max_new_tokens=15, use_cache=False)
        own = own if int(own[0, 0]) == int(start) else torch.cat([start, own], dim=1)
        before = base(**sound, decoder_input_ids=own, use_cache=False)
        tuned = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        after = tuned(**sound, decoder_input_ids=own, use_cache=False)
    [change] = report.by_prompt
    require(change, before, after, own)


def test_a_model_without_a_decoder_is_one_line(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="--stack decoder: LlamaForCausalLM is no encoder with a decoder"):
        lora_diff(checkpoint, checkpoint, prompts=["a"], stack="decoder")
