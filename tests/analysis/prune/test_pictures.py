"""Removals in models of pictures and sound, against plain hooks on the model's own modules in float64."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from image_models import CASES, SMALL, build, written
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from duat_cli.api.models import prune_bound
from duat_cli.cli.main import run
from duat_cli.errors import UnsupportedModelError

HEADS = 4
PARTS = {  # blocks, the projection behind attention, the FFN's last layer
    "vit": ("vit.layers", "attention.o_proj", "mlp.fc2"),
    "dinov2": ("encoder.layer", "attention.o_proj", "mlp.fc2"),
    "clip_vision_model": ("encoder.layers", "self_attn.out_proj", "mlp.fc2"),
    "sam": ("vision_encoder.layers", "attn.proj", "mlp.lin2"),  # a map of tokens, and behind it another by convolutions
    "whisper": ("model.encoder.layers", "self_attn.out_proj", "fc2"),
    "wav2vec2": ("wav2vec2.encoder.layers", "attention.out_proj", "feed_forward.output_dense"),
}


def inputs(name: str, count: int = 2) -> list[dict[str, Tensor]]:
    torch.manual_seed(5)
    return [{key: torch.randn(value.shape) for key, value in CASES[name][1]().items()} for _ in range(count)]


def output(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Logits of a classifier, last hidden states of what is else, of an encoder-decoder of its encoder."""
    doubles = {key: value.double() for key, value in given.items()}
    with torch.no_grad():
        if type(model).__name__ == "ViTForImageClassification":
            return model(**doubles).logits
        stack = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        return stack(**doubles).last_hidden_state


def damage(after: Tensor, before: Tensor) -> float:
    if after.ndim == 2:
        p, q = (functional.log_softmax(one, dim=-1) for one in (before, after))
        return float((p.exp() * (p - q)).sum())
    return float((after - before).norm() / before.norm())


@contextlib.contextmanager
def without(model: nn.Module, name: str, term: Any) -> Iterator[None]:
    """The model without the term."""
    blocks, attention, ffn = PARTS[name]
    block = model.get_submodule(f"{blocks}.{term.block}")
    if term.kind == "block":
        keep = lambda _module, args, kwargs, _out: args[0] if args else kwargs["hidden_states"]  # noqa: E731
        handle = block.register_forward_hook(keep, with_kwargs=True)
    elif term.kind in ("ffn", "attention"):
        layer = block.get_submodule(ffn if term.kind == "ffn" else attention)
        handle = layer.register_forward_hook(lambda _module, _args, out: torch.zeros_like(out))
    else:
        layer = block.get_submodule(ffn if term.kind == "neuron" else attention)
        width = 1 if term.kind == "neuron" else layer.in_features // HEADS  # type: ignore[operator]

        def silent(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            value = args[0].clone()
            value[..., term.index * width : (term.index + 1) * width] = 0
            return value, *args[1:]

        handle = layer.register_forward_pre_hook(silent)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("name", PARTS)
def test_every_term_is_what_hooks_say(name: str) -> None:
    model, read = build(name).double(), inputs(name)
    report = prune_bound(model, inputs=read, measure=12, probes=200)
    assert report.protocol.metric == ("kl" if name == "vit" else "hidden")
    assert report.certificate.exact
    assert not report.pooled
    before = [output(model, one) for one in read]
    measured = [one for one in report.terms if one.measured is not None]
    assert {one.kind for one in measured} == {"neuron", "head", "ffn", "attention", "block"}
    for term in measured:
        with without(model, name, term):
            after = [output(model, one) for one in read]
        each = [damage(*both) for both in zip(after, before, strict=True)]
        # of KL a part in 1e12 is what attention rounds to in float32; SAM's softmax is of float32
        within = 1e-5 if name == "sam" else 1e-6
        assert term.measured == pytest.approx(sum(each) / len(each), rel=within, abs=1e-11), term
    small = [one for one in measured if one.kind == "neuron"]
    close = [one for one in small if one.linearised * 0.5 <= one.measured <= one.linearised * 2]
    assert len(close) > 0.8 * len(small)


@pytest.mark.parametrize(("name", "kinds"), [("vit", "neuron,attention"), ("whisper", "head,ffn,block")])
def test_weights_read_block_by_block_give_the_same(name: str, kinds: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "model")
    files = written(inputs(name, 6), tmp_path)
    on_disk = tmp_path / "disk.json"
    on_disk.write_text('{"": "disk"}')
    asked: dict[str, Any] = {
        "inputs": files, "dtype": "float64", "holdout": 0.5, "exceed": 0.9, "criteria": True, "measure": 4, "probes": 8,
        "granularity": kinds,
    }  # fmt: skip
    resident = prune_bound(str(tmp_path / "model"), **asked)
    streamed = prune_bound(str(tmp_path / "model"), **asked, device_map=str(on_disk))
    assert any(plan.guarantee is not None for plan in resident.plans)
    assert [plan.removed for plan in resident.plans] == [plan.removed for plan in streamed.plans]
    for field, value in (("terms", "measured"), ("terms", "linearised"), ("plans", "measured"), ("eq16", "measured")):
        one, other = ([getattr(entry, value) for entry in getattr(report, field)] for report in (resident, streamed))
        for mine, theirs in zip(one, other, strict=True):  # other rows; attention rounds to float32
            assert mine == theirs or mine == pytest.approx(theirs, rel=1e-5, abs=1e-12), (field, value)


def test_a_set_is_written_and_measured_again(tmp_path: Path) -> None:
    """It is read back by transformers, and does there what was measured."""
    model = build("vit")
    model.save_pretrained(tmp_path / "model")
    save_file(inputs("vit", 1)[0], tmp_path / "one.safetensors")
    words = ["prune-bound", str(tmp_path / "model"), "--inputs", str(tmp_path / "one.safetensors"), "-q"]
    words += ["--granularity", "block", "--remove", "40%", "--apply", str(tmp_path / "less"), "-o"]
    assert run([*words, str(tmp_path / "report.json")]) == 0
    less = type(model).from_pretrained(tmp_path / "less").double().eval()
    given = inputs("vit", 1)[0]
    assert len(less.vit.layers) == 1
    [plan] = json.loads((tmp_path / "report.json").read_text())["plans"]
    want = damage(output(less, given), output(model.double(), given))
    assert plan["measured"] == pytest.approx(want, rel=1e-3)


def test_what_it_cannot_follow_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="downsample makes 16 tokens of width 16 of 64 tokens of width 8"):
        prune_bound(build("swin"), inputs=inputs("swin", 1))


def test_a_part_of_a_model_of_several_is_pruned_as_that_part_alone() -> None:
    text = {key: value for key, value in SMALL.items() if key not in ("image_size", "patch_size")}
    config = t.CLIPConfig(
        vision_config=SMALL, text_config=text | {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2}
    )
    model = t.CLIPModel(config).eval()
    read = inputs("clip_vision_model", 1)
    part = prune_bound(model, inputs=read, stack="vision", measure=4, probes=8)
    alone = prune_bound(model.vision_model, inputs=read, measure=4, probes=8)
    assert any(note.startswith("--stack vision: the CLIPVision") for note in part.warnings)
    assert [one.model_dump() for one in part.terms] == [one.model_dump() for one in alone.terms]
