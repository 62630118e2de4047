"""Removals in models that read pictures within a text, against plain hooks on the untouched model in float64: every
kind of term, KL and loss of the words, sets, and the checkpoints that are written without them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import picture_texts
import pytest
import torch
import transformers as t
from helpers import first_two
from paging import streaming
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn, no_grad

from duat_cli.analysis.prune.sets.apply import TEXTS_ALONE
from duat_cli.api.models import prune_bound
from duat_cli.cli.main import run
from duat_cli.errors import InputError
from duat_cli.results.prune.report import PruneReport
from duat_cli.zoo import tiny

WIDTH = 8  # of a head
ROUGH = {"gemma3": 1e-5, "paligemma": 1e-5}  # their norms compute in float32


@contextlib.contextmanager
def without(model: nn.Module, terms: list[tuple[str, int, int | None]]) -> Iterator[None]:
    """The model without these terms: kind, block and number of each."""
    with contextlib.ExitStack() as stack:
        for kind, block, index in terms:
            stack.callback(_silenced(picture_texts.blocks_of(model)[block], kind, index).remove)
        yield


def _silenced(block: Any, kind: str, index: int | None) -> Any:
    if kind == "block":
        keep = lambda _m, args, kwargs, _out: args[0] if args else kwargs["hidden_states"]  # noqa: E731
        return block.register_forward_hook(keep, with_kwargs=True)
    if kind == "expert":

        def unused(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, chosen, weights = args
            return hidden, chosen, weights.masked_fill(chosen == index, 0)

        return block.mlp.experts.register_forward_pre_hook(unused)
    layer = block.self_attn.o_proj if kind in ("head", "attention") else block.mlp
    if kind in ("ffn", "attention"):
        return layer.register_forward_hook(lambda _m, _args, out: torch.zeros_like(out))
    layer, width = (layer, WIDTH) if kind == "head" else (layer.down_proj, 1)

    def silent(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert index is not None
        value = args[0].clone()
        value[..., index * width : (index + 1) * width] = 0
        return (value,)

    return layer.register_forward_pre_hook(silent)


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    with no_grad():
        found: Tensor = model(**picture_texts.doubled(given)).logits[0]
    return found


def states(model: Any, given: dict[str, Tensor]) -> Tensor:
    with no_grad():
        found: Tensor = model.model(**picture_texts.doubled(given)).last_hidden_state
    return found


def kl(before: Tensor, after: Tensor, given: dict[str, Tensor]) -> float:
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    words = given["input_ids"][0] != picture_texts.MARK
    return float((p.exp() * (p - q)).sum(-1)[words].mean())


def loss(found: Tensor, given: dict[str, Tensor]) -> float:
    ids = given["input_ids"][0]
    places = [k for k in range(1, len(ids)) if ids[k] != picture_texts.MARK]
    return -float(found.log_softmax(-1)[[k - 1 for k in places], ids[places]].mean())


def require_measured(report: PruneReport, model: Any, given: list[dict[str, Tensor]], rough: float = 1e-7) -> set[str]:
    """Every measured damage, in KL, is what hooks say. Returns the kinds that were measured."""
    before = [logits(model, one) for one in given]
    kinds = set[str]()
    for term in (one for one in report.terms if one.measured is not None):
        with without(model, [(term.kind, term.block, term.index)]):
            each = [kl(old, logits(model, one), one) for old, one in zip(before, given, strict=True)]
        assert term.measured == pytest.approx(sum(each) / len(each), rel=rough, abs=1e-11), term
        kinds.add(term.kind)
    return kinds


@pytest.mark.parametrize("name", picture_texts.RUNNING)
def test_every_measured_term_is_what_hooks_say(name: str) -> None:
    """Qwen3-VL also adds features of the picture behind its first block, which Eq. 16 keeps."""
    model = first_two(picture_texts.build(name)).double()
    given = [picture_texts.inputs(name, model, seed) for seed in (0, 1)]
    report = prune_bound(model, inputs=given, measure=12, probes=100)
    assert report.protocol.metric == "kl"
    assert report.certificate.exact
    assert max(row.error for row in report.eq16) < 1e-6
    assert all(row.held == pytest.approx(row.bound, rel=1e-5) for row in report.eq16)
    kinds = require_measured(report, model, given, ROUGH.get(name, 1e-7))
    assert kinds == {"neuron", "head", "ffn", "attention", "block"}
    small = [one for one in report.terms if one.kind == "neuron" and one.measured is not None]
    close = [one for one in small if one.linearised * 0.5 <= one.measured <= one.linearised * 2]
    assert len(close) > 0.8 * len(small)
    if name == "paligemma":  # its words see those behind them
        assert report.protocol.loss is None
        assert report.protocol.reasons["loss"] == (
            "words that PaliGemmaForConditionalGeneration reads with a picture see those behind them"
        )
        with pytest.raises(InputError, match=r"--metric nll: words that PaliGemma.* see those behind them; use"):
            prune_bound(model, inputs=given, metric="nll")
        return
    losses = [loss(logits(model, one), one) for one in given]
    assert report.protocol.loss == pytest.approx(sum(losses) / 2, rel=1e-9)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_other_metrics_are_what_hooks_say(name: str) -> None:
    model = first_two(picture_texts.build(name)).double()
    given = picture_texts.inputs(name, model)
    before, own = loss(logits(model, given), given), states(model, given)
    for metric in ("nll", "hidden"):
        report = prune_bound(model, inputs=given, measure=2, probes=8, metric=metric)  # type: ignore[arg-type]
        for term in (one for one in report.terms if one.measured is not None):
            with without(model, [(term.kind, term.block, term.index)]):
                if metric == "nll":
                    want = loss(logits(model, given), given) - before
                else:
                    want = float((states(model, given) - own).norm() / own.norm())
            assert term.measured == pytest.approx(want, rel=1e-8, abs=1e-11), (metric, term)


def test_experts_are_what_hooks_say() -> None:
    eye = t.CLIPVisionConfig(**picture_texts.EYE, projection_dim=16)
    text = t.MixtralConfig(**picture_texts.TEXT, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = t.LlavaForConditionalGeneration._from_config(
        t.LlavaConfig(vision_config=eye, text_config=text, image_token_id=picture_texts.MARK),
        attn_implementation="eager", experts_implementation="eager",
    ).eval().double()  # fmt: skip
    tiny.randomise(model, 0)
    given = [picture_texts.inputs("llava", model)]
    report = prune_bound(model, inputs=given, measure=8, probes=8)
    assert require_measured(report, model, given) == {"head", "expert", "ffn", "attention", "block"}


@pytest.mark.parametrize(
    ("name", "kinds"), [("llava", "ffn,attention"), ("qwen2_5_vl", "head,block"), ("qwen3_vl", "neuron,block")]
)
def test_weights_read_block_by_block_give_the_same(name: str, kinds: str, tmp_path: Path) -> None:
    model = picture_texts.build(name)
    model.save_pretrained(tmp_path / "m")
    asked: dict[str, Any] = {
        "inputs": [picture_texts.inputs(name, model, seed) for seed in range(4)], "dtype": "float64", "holdout": 0.5,
        "exceed": 0.9, "confidence": 0.6, "criteria": True, "measure": 4, "probes": 8, "granularity": kinds,
    }  # fmt: skip
    whole = prune_bound(tmp_path / "m", **asked)
    with streaming():
        parts = prune_bound(tmp_path / "m", **asked)
    assert any(plan.guarantee is not None for plan in whole.plans)
    assert [plan.removed for plan in whole.plans] == [plan.removed for plan in parts.plans]
    for field in ("terms", "plans", "eq16", "prediction"):
        for one, other in zip(getattr(whole, field), getattr(parts, field), strict=True):
            found = other.model_dump()
            for key, value in one.model_dump().items():
                if isinstance(value, float):  # in other rows; attention rounds to float32
                    assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-11), (field, key)


BLOCKS, WIDTHS, HEADS, REPAIRED = (
    ["block", "--remove", "30%"], ["neuron", "--remove", "10%", "--uniform"], ["head", "--remove", "10%"],
    ["neuron", "--remove", "10%", "--repair"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [("llava", BLOCKS), ("llava", REPAIRED), ("gemma3", WIDTHS), ("mistral3", HEADS), ("qwen3_vl", BLOCKS),
     ("qwen3_vl", REPAIRED)],
)  # fmt: skip
def test_a_set_and_the_checkpoint_without_it_do_what_is_measured(name: str, words: list[str], tmp_path: Path) -> None:
    model = picture_texts.build(name)
    model.save_pretrained(tmp_path / "m")
    given = [picture_texts.inputs(name, model, seed) for seed in (0, 1)]
    files = [str(tmp_path / f"{k}.safetensors") for k in range(2)]
    for file, one in zip(files, given, strict=True):
        save_file(one, file)
    asked = ["prune-bound", str(tmp_path / "m"), *(word for file in files for word in ("--inputs", file)), "-q"]
    asked += ["--probes", "8", "--measure", "2", "--granularity", *words, "--dtype", "float64", "--apply"]
    asked += [str(tmp_path / "less"), "--export", str(tmp_path / "set.json"), "-o", str(tmp_path / "report.json")]
    assert run(asked) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    own = type(model).from_pretrained(tmp_path / "m", attn_implementation="eager").double()
    less = type(model).from_pretrained(tmp_path / "less", attn_implementation="eager").double()
    before, after = ([logits(one, each) for each in given] for one in (own, less))
    [plan], written, rough = report["plans"], report["written"], ROUGH.get(name, 1e-7)
    chosen = json.loads((tmp_path / "set.json").read_text())["terms"]
    with without(own, [(one["kind"], one["block"], one["index"]) for one in chosen]):
        removed = [logits(own, each) for each in given]
    want = [sum(map(kl, before, found, given)) / 2 for found in (removed, after)]
    assert plan["measured"] == pytest.approx(want[plan["repair"] is not None], rel=rough)
    assert written["damage"] == pytest.approx(want[1], rel=rough)
    assert written["perplexity_after"] == pytest.approx(np.exp(sum(map(loss, after, given)) / 2), rel=rough)
    assert written["tokens"] == 2 * 8
    assert TEXTS_ALONE not in written["notes"]


def test_a_block_cut_on_texts_alone_has_a_note_that_pictures_were_not_compared(tmp_path: Path) -> None:
    """Behind the first block, which is the smallest here, this model adds features of a picture."""
    model = picture_texts.build("qwen3_vl")
    first = picture_texts.blocks_of(model)[0]
    for layer in (first.mlp.down_proj, first.self_attn.o_proj):
        layer.weight.data.mul_(0.05)
    model.save_pretrained(tmp_path / "m")
    given = picture_texts.inputs("qwen3_vl", model)
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [11, 40, 23, 57, 31, 62]}\n', encoding="utf-8")
    asked = ["prune-bound", str(tmp_path / "m"), "--prompts", str(tmp_path / "ids.jsonl"), "-q", "--probes", "8"]
    asked += ["--granularity", *BLOCKS, "--apply", str(tmp_path / "less"), "-o", str(tmp_path / "report.json")]
    assert run(asked) == 0
    written = json.loads((tmp_path / "report.json").read_text())["written"]
    assert (written["removed_blocks"], written["notes"]) == ([0], [TEXTS_ALONE])
    less = type(model).from_pretrained(tmp_path / "less", attn_implementation="eager").double()
    with without(model.double(), [("block", 0, None)]):
        expected = logits(model, given)
    assert (logits(less, given) - expected).norm() > 0.1 * expected.norm()


def test_pictures_and_texts_come_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture_texts.save_llava(tmp_path / "m")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    words = ["prune-bound", str(tmp_path / "m"), "--image", str(tmp_path / "a.png"), "-q", "--json"]
    words += ["--prompt", "USER <image> What is it ?", "--prompt", "What is in the picture <image> ?", "--probes", "8"]
    capsys.readouterr()
    assert run(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["tokens"] for one in report["prompts"]] == [21, 22]
    assert "tokens that are no piece of a picture, video or sound" in report["protocol"]["meaning"]
    (tmp_path / "lines.txt").write_text("a <image>\n")
    for more, said in (
        (
            ["--holdout", str(tmp_path / "lines.txt"), "--exceed", "0.9", "--confidence", "0.6"],
            "a file holds texts; of pictures or sounds give a share",
        ),
        (["--out", str(tmp_path / "out")], "--out and --image contradict each other"),
    ):
        assert run([*words, *more]) == 2
        assert said in capsys.readouterr().err


def test_a_picture_beside_the_text_is_refused() -> None:
    model = t.BlipForConditionalGeneration(tiny.tiny_model("blip").config).eval()
    size = model.config.vision_config.image_size
    given = {"pixel_values": torch.randn(1, 3, size, size), "input_ids": torch.tensor([[5, 9, 30, 41]])}
    with pytest.raises(InputError, match="BlipForConditionalGeneration reads a picture beside its text, not within it"):
        prune_bound(model, inputs=given)
