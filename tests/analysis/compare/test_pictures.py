"""Two pictures or sounds through one model, against plain hooks on the model's own modules in float64."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from helpers import InDouble
from image_models import CASES, SMALL, build, written
from torch import Tensor, nn
from torch.nn import functional

from duat_cli.api.comparing import compare
from duat_cli.errors import InputError, UnsupportedModelError

HEADS = 4
SOFTMAX = functional.softmax


@dataclass(frozen=True)
class Named:
    """Modules of a model, as its code names them."""

    blocks: str
    norm: str | None  # in front of attention
    value: str
    output: str
    first: str  # of the FFN
    last: str
    scale: str | None = None  # of a layer on attention's branch


MODELS = {
    "vit": Named("vit.layers", "layernorm_before", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2"),
    "clip_vision_model": Named(
        "encoder.layers", "layer_norm1", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"
    ),
    "dinov2": Named(
        "encoder.layer", "norm1", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2", "layer_scale1"
    ),
    "whisper": Named(
        "model.encoder.layers", "self_attn_layer_norm", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"
    ),
    "wav2vec2": Named(
        "wav2vec2.encoder.layers", None, "attention.v_proj", "attention.out_proj", "feed_forward.intermediate_dense",
        "feed_forward.output_dense",
    ),
}  # fmt: skip


def inputs(name: str, count: int = 2) -> list[dict[str, Tensor]]:
    torch.manual_seed(5)
    made = [CASES[name][1]() for _ in range(count)]
    return [{k: torch.randn(v.shape) if v.is_floating_point() else v for k, v in one.items()} for one in made]


class Frozen:
    """The model in float64, whose softmax and norms are recorded in one pass and held in the next."""

    def __init__(self, model: Any, blocks: list[Any], last: str) -> None:
        self.model, self.blocks, self.last = model.double(), blocks, last
        self.scales: dict[Any, Tensor] = {}
        self.weights: list[Tensor] = []
        self.before: dict[int, Tensor] = {}
        self.ffn: dict[int, Tensor] = {}
        self.seen: dict[Any, Tensor] = {}
        self._called, self._holds = 0, False

    @contextlib.contextmanager
    def passing(self, watched: dict[str, str], *, zero: bool) -> Iterator[None]:
        """zero: x_0 is zero, and all else is held."""
        self._holds, self._called = zero, 0
        handles = []
        for k, block in enumerate(self.blocks):
            handles += [
                block.register_forward_pre_hook(lambda _m, a, kw, k=k: self._in(k, a, kw), with_kwargs=True),
                block.register_forward_hook(lambda _m, _a, out, k=k: self._out("output", k, out)),
                block.get_submodule(self.last).register_forward_hook(lambda _m, _a, out, k=k: self._ffn(k, out)),
            ]
            for role, path in watched.items():
                inner = block.get_submodule(path)
                handles.append(inner.register_forward_hook(lambda _m, _a, out, k=k, r=role: self._out(r, k, out)))
        norm = nn.LayerNorm.forward
        nn.LayerNorm.forward = lambda module, x: self._norm(module, x)  # type: ignore[method-assign]  # noqa: PLW0108
        functional.softmax = lambda x, dim=-1, **_: self._softmax(x, dim)  # type: ignore[assignment]
        try:
            with torch.no_grad():
                yield
        finally:
            nn.LayerNorm.forward, functional.softmax = norm, SOFTMAX  # type: ignore[method-assign,assignment]
            for handle in handles:
                handle.remove()

    def _in(self, k: int, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if not self._holds:
            self.before[k] = x[0]
        elif k == 0:
            x = torch.zeros_like(x)
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
        return None

    def _out(self, role: str, k: int, out: Any) -> None:
        self.seen[role, k] = (out if isinstance(out, Tensor) else out[0])[0]

    def _ffn(self, k: int, out: Tensor) -> Tensor | None:
        if self._holds:
            return self.ffn[k].clone()
        self.ffn[k] = out
        return None

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        if not self._holds:
            self.scales[module] = (centred.square().mean(-1, keepdim=True) + module.eps).rsqrt()
        return centred * self.scales[module] * module.weight + module.bias

    def _softmax(self, x: Tensor, dim: int) -> Tensor:
        if not self._holds:
            self.weights.append(SOFTMAX(x, dim=dim))
            return self.weights[-1]
        self._called += 1
        return self.weights[self._called - 1]


@dataclass(frozen=True)
class Seen:
    """One block under one input."""

    H: Tensor
    s: Tensor
    A: Tensor
    input: Tensor
    output: Tensor
    bias: Tensor

    def operator(self, H: Tensor, s: Tensor) -> Tensor:
        return torch.einsum("hij,j,hab->ijab", H, s, self.A)


def seen_of(name: str, model: Any, given: dict[str, Tensor]) -> tuple[list[Seen], Tensor | None]:
    named = MODELS[name]
    blocks = list(model.get_submodule(named.blocks))
    frozen, doubles = Frozen(model, blocks, named.last), {k: v.double() for k, v in given.items()}
    stack = model.get_encoder() if model.config.is_encoder_decoder else model
    with frozen.passing({}, zero=False):
        logits = getattr(stack(**doubles), "logits", None)
        outputs = [frozen.seen["output", k] for k in range(len(blocks))]
    with frozen.passing({"first": named.first}, zero=True):
        stack(**doubles)
    found = []
    for k, block in enumerate(blocks):
        V, out = (block.get_submodule(path).weight.detach().T for path in (named.value, named.output))
        s = torch.ones(len(frozen.before[k])).double()
        if named.norm is not None:
            norm = block.get_submodule(named.norm)
            V = (torch.eye(len(V)).double() - 1 / len(V)) @ (norm.weight.detach()[:, None] * V)
            s = frozen.scales[norm].flatten()
        if named.scale is not None:
            out = out * block.get_submodule(named.scale).lambda1.detach()
        A = torch.stack([v @ o for v, o in zip(V.chunk(HEADS, 1), out.chunk(HEADS, 0), strict=True)])
        found.append(Seen(frozen.weights[k][0], s, A, frozen.before[k], outputs[k], frozen.seen["first", k]))
    return found, logits


def relative(a: Tensor, b: Tensor) -> float:
    return float(((b - a).norm() / a.norm()).detach())


@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_that_of_the_model_itself(name: str) -> None:
    model, given = build(name).double(), inputs(name)
    model.set_attn_implementation("eager")
    with InDouble():
        report = compare(model, inputs=given, cache=False)
    assert report.certificate.relative_error < 1e-12
    (firsts, before), (seconds, after) = (seen_of(name, model, one) for one in given)
    for block, a, b in zip(report.comparison.blocks, firsts, seconds, strict=True):
        W, even = a.operator(a.H, a.s), torch.full_like(a.H, 1 / a.H.shape[-1])
        parts = {
            "relative": b.operator(b.H, b.s) - W,
            "routing": a.operator(b.H - a.H, a.s),
            "scale": a.operator(a.H, b.s - a.s),
            "interaction": a.operator(b.H - a.H, b.s - a.s),
        }
        for key, part in parts.items():
            assert getattr(block.operator, key) == pytest.approx(float(part.norm() / W.norm()), rel=1e-9, abs=1e-12)
        moved = relative(a.operator(even, a.s), a.operator(even, b.s))
        assert block.operator.null.relative == pytest.approx(moved, rel=1e-9, abs=1e-12)
        assert block.operator.unaligned == 0.0
        assert block.bias == pytest.approx(relative(a.bias, b.bias), rel=1e-9)
        for key in ("input", "output"):
            expected = statistics.fmean(map(relative, getattr(a, key), getattr(b, key)))
            assert getattr(block, key) == pytest.approx(expected, rel=1e-9)
        for h, head in enumerate(block.heads):
            assert head.relative == pytest.approx(relative(a.H[h] * a.s, b.H[h] * b.s), rel=1e-9)
    if name == "vit":
        p, q = (logits.log_softmax(-1) for logits in (before, after))
        assert report.pairs[0].kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-6)
    else:
        assert report.pairs[0].kl is None


@pytest.mark.parametrize("name", ["vit", "whisper", "swin"])
def test_weights_read_block_by_block_give_the_same(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "model")
    files = written(inputs(name), tmp_path)
    disk = tmp_path / "disk.json"
    disk.write_text('{"": "disk"}')
    asked: dict[str, Any] = {"inputs": files, "patch": "tokens" if name == "vit" else None, "cache": False}
    whole = compare(str(tmp_path / "model"), **asked)
    parts = compare(str(tmp_path / "model"), **asked, device_map=str(disk))
    assert whole.comparison == parts.comparison
    assert (whole.pairs, whole.patched) == (parts.pairs, parts.patched)
    assert [prompt.label for prompt in whole.prompts] == [f"--inputs {file}" for file in files]


def test_blocks_of_a_model_of_stages_are_compared_on_their_own_places() -> None:
    """Which has fewer places and more width behind each merging."""
    model, given = build("swin"), inputs("swin")
    report = compare(model, inputs=given, cache=False)
    states = [model.swin(**one, output_hidden_states=True).hidden_states for one in given]
    moved = [statistics.fmean(map(relative, a[0], b[0])) for a, b in zip(*states, strict=True)]
    assert report.prompts[0].tokens == 64
    merging = report.comparison.blocks[2]
    assert merging.operator.relative is None
    assert report.comparison.blocks[0].input == pytest.approx(moved[0], rel=1e-5)
    assert merging.output == pytest.approx(moved[1], rel=1e-5)  # on 16 places, all that there are
    assert all(block.operator.relative for block in report.comparison.blocks if block is not merging)
    with pytest.raises(UnsupportedModelError, match="SwinAttention attends within windows, where no other weights"):
        compare(model, inputs=given, patch="heads", cache=False)


def test_patches_move_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = t.ViTForImageClassification(t.ViTConfig(**SMALL, id2label=dict(enumerate("xyz")))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    given = inputs("vit", 3)
    found = compare(model, inputs=given, patch="blocks", target="z", against="x", cache=False).patched
    assert found is not None
    assert found.holds
    assert [(pair.token_a, pair.token_b) for pair in found.pairs] == [("x", "z")] * 2
    for k, block in enumerate(model.vit.layers):
        gave, ends = [], []
        for one in given:
            handle = block.mlp.register_forward_hook(lambda _m, _a, out, gave=gave: gave.append(out))
            ends.append(model(**one).logits[0].detach())
            handle.remove()
        moved = []
        for b in (1, 2):
            handle = block.mlp.register_forward_hook(lambda _m, _a, _out, one=gave[b]: one)
            moved.append(model(**given[0]).logits[0].detach())
            handle.remove()
        apart = sum((end[2] - end[0]) - (ends[0][2] - ends[0][0]) for end in ends[1:])
        want = sum((end[2] - end[0]) - (ends[0][2] - ends[0][0]) for end in moved) / apart
        effect = found.blocks[k].ffn
        assert effect is not None
        assert effect.effect == pytest.approx(float(want), rel=1e-3, abs=1e-5)
    tokens = compare(model, inputs=given[:2], patch="tokens", cache=False, layers=0).patched
    assert tokens is not None
    assert [token.text for token in tokens.blocks[0].tokens][:2] == ["#0", "#1"]
    assert tokens.blocks[0].tokens[0].effect == 0.0  # the class token is the same in front of the first block


def test_patches_that_only_fill_up_a_picture_are_left_out() -> None:
    model, given = build("siglip2_vision_model"), inputs("siglip2_vision_model")
    for one in given:
        one["pixel_attention_mask"] = (torch.arange(16) < 12).long()[None]
        one["spatial_shapes"] = torch.tensor([[3, 4]])
    report = compare(model, inputs=given, cache=False)
    assert (report.prompts[0].tokens, report.pairs[0].aligned) == (16, 12)
    other = [given[0], {**given[1], "pixel_values": given[1]["pixel_values"].clone()}]
    other[1]["pixel_values"][:, 12:] = 9.0
    for one, two in zip(report.comparison.blocks, compare(model, inputs=other).comparison.blocks, strict=True):
        assert one.output == pytest.approx(two.output, rel=1e-6)
        assert one.operator.relative == pytest.approx(two.operator.relative, rel=1e-6)


def test_pictures_of_one_size_and_sounds_of_one_length() -> None:
    sounds = [{"input_values": torch.randn(1, length)} for length in (200, 300)]
    with pytest.raises(InputError, match=r"1 \(dict\) has 19 positions and --inputs 2 \(dict\) 29, .*of one length"):
        compare(build("wav2vec2"), inputs=sounds)
    pictures = inputs("siglip2_vision_model")
    pictures[1]["spatial_shapes"] = torch.tensor([[2, 8]])
    with pytest.raises(InputError, match="other spatial_shapes, so that one place in both is another part"):
        compare(build("siglip2_vision_model"), inputs=pictures)


def test_without_a_file_two_inputs_are_made_up() -> None:
    report = compare(build("vit"), cache=False)
    assert [prompt.label for prompt in report.prompts] == ["drawn picture", "noise of its shape"]
    assert "no file was given: read was a drawn picture and noise of its shape" in report.warnings
    assert report.comparison.blocks[0].operator.relative


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="it is no classifier of a picture or a sound, so there is no one"):
        compare(build("wav2vec2"), inputs=inputs("wav2vec2"), patch="heads")


def test_a_part_of_a_model_of_several_is_compared_as_that_part_alone() -> None:
    text = {key: value for key, value in SMALL.items() if key not in ("image_size", "patch_size")}
    config = t.CLIPConfig(
        vision_config=SMALL, text_config=text | {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2}
    )
    model, read = t.CLIPModel(config).eval(), inputs("clip_vision_model")
    part = compare(model, inputs=read, stack="vision", cache=False)
    assert part.comparison == compare(model.vision_model, inputs=read, cache=False).comparison
    written = compare(model, prompts=[[5, 6, 7], [5, 8, 7]], stack="text", align="position", cache=False)
    assert [prompt.tokens for prompt in written.prompts] == [3, 3]
