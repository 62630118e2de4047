"""Removals in decoders of encoder-decoders, against plain hooks on the whole untouched model in float64: every kind of
term, cross-attention among them, what the sets do, and the checkpoints that are written without them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import image_models
import pytest
import torch
from decoders import save_t5
from helpers import first_two
from paging import streaming
from torch import Tensor, nn, no_grad
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM

from duat_cli.analysis.prune.terms.certified import ENCODER
from duat_cli.api.models import prune_bound
from duat_cli.cli.main import run
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.terms import PruneTerm
from duat_cli.zoo.tiny import tiny_model

IDS = [[41, 52, 63, 74, 85, 41, 60], [20, 30, 63, 11, 85]]
HEAR = ["whisper", "pictures of two models"]


def model_of(name: str) -> Any:
    """A model of two blocks in float64 with biases and norms that are none of the zeros and ones they begin with."""
    model = image_models.build(name) if name in HEAR else first_two(tiny_model(name))
    started(model)
    generator = torch.Generator().manual_seed(1)
    model.double().eval()
    with no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def started(model: Any) -> Any:
    """The model with a token to begin with, and without a last one that it has to write."""
    if getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 3
    model.generation_config.forced_eos_token_id = None
    return model


def inputs_of(name: str) -> list[dict[str, Tensor]]:
    if name not in HEAR:
        return [{"input_ids": torch.tensor([ids])} for ids in IDS]
    given = image_models.CASES[name][1]()
    return [{key: value.double() if value.is_floating_point() else value for key, value in given.items()}]


def report_of(model: Any, given: Sequence[dict[str, Tensor]], **options: Any) -> PruneReport:
    asked = {"prompts": [one["input_ids"][0] for one in given]} if "input_ids" in given[0] else {"inputs": list(given)}
    return prune_bound(model, stack="decoder", **asked, **options)


def written(model: Any, given: dict[str, Tensor]) -> Tensor:
    """What the model itself writes behind its start token, (1, N)."""
    with no_grad():
        found: Tensor = model.generate(**given, do_sample=False, num_beams=1, max_new_tokens=15, use_cache=False)
    start = torch.tensor([[model.generation_config.decoder_start_token_id or model.config.decoder_start_token_id]])
    return found if int(found[0, 0]) == int(start) else torch.cat([start, found], dim=1)  # Whisper leaves it out


def logits(model: Any, given: dict[str, Tensor], own: Tensor) -> Tensor:
    with no_grad():
        found: Tensor = model(**given, decoder_input_ids=own, use_cache=False).logits[0]
    return found


def kl(before: Tensor, after: Tensor) -> float:
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@contextlib.contextmanager
def without(model: Any, report: PruneReport, terms: Sequence[PruneTerm]) -> Iterator[None]:
    """The model without these terms, which hooks take out by the names of their modules."""
    decoder = model.get_decoder()
    names = dict(decoder.named_modules())
    if terms[0].module not in names:  # of a language model with a head in the place of a decoder
        names = dict(decoder.base_model.named_modules())
    with contextlib.ExitStack() as stack:
        for term in terms:
            beside = [t.index for t in report.terms if (t.kind, t.module) == (term.kind, term.module)]
            hook = silenced(names[term.module], term.kind, beside.index(term.index), len(beside))
            stack.callback(hook.remove)
        yield


def silenced(module: nn.Module, kind: str, number: int, count: int) -> Any:
    """The hook that takes out one of `count` terms at a module."""
    if kind == "block":

        def keep(_m: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        return module.register_forward_hook(keep, with_kwargs=True)
    if kind in ("attention", "ffn"):
        return module.register_forward_hook(
            lambda _m, _args, out: (out[0] * 0, *out[1:]) if isinstance(out, tuple) else out * 0
        )

    def silent(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        value = args[0].clone()
        width = value.shape[-1] // count
        value[..., number * width : (number + 1) * width] = 0
        return (value, *args[1:])

    return module.register_forward_pre_hook(silent)


@pytest.mark.parametrize("name", ["t5", "bart", "encoder-decoder", "t5gemma", *HEAR])
def test_every_measured_term_is_what_hooks_say(name: str) -> None:
    model, given = model_of(name), inputs_of(name)
    report = report_of(model, given, measure=12, probes=8)
    own = [written(model, one) for one in given]
    before = [logits(model, *each) for each in zip(given, own, strict=True)]
    assert report.certificate.exact
    assert max(row.error for row in report.eq16) < 1e-6
    measured = [term for term in report.terms if term.measured is not None]
    for term in measured:
        with without(model, report, [term]):
            each = [kl(b, logits(model, g, o)) for b, g, o in zip(before, given, own, strict=True)]
        assert term.measured == pytest.approx(sum(each) / len(each), rel=1e-7, abs=1e-11), term
        if term.certified_relative is not None and term.local is not None:
            assert term.local <= term.certified_relative
    assert {term.kind for term in measured} == {"neuron", "head", "ffn", "attention", "block"}
    losses = [float(cross_entropy(b[:-1], o[0, 1:])) for b, o in zip(before, own, strict=True)]
    assert report.protocol.loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_cross_attention_is_told_from_the_blocks_own() -> None:
    model, given = model_of("t5"), inputs_of("t5")
    report = report_of(model, given, measure=8, probes=8, granularity="head,attention,block")
    crossing = [term for term in report.terms if "EncDecAttention" in term.module]
    assert {(term.kind, term.index) for term in crossing} == {("attention", 1), *(("head", k) for k in range(4, 8))}
    assert all(term.certified is None and term.reasons["certified"] == ENCODER for term in crossing)
    assert all(term.certified is None for term in report.terms if term.kind == "block")  # it is in the block
    assert "cross-attention is numbered behind a block's own attention: attention 1 and heads 4-7" in report.warnings
    for block in report.blocks:
        own, cross = [t for t in report.terms if (t.kind, t.block) == ("attention", block.index)]
        assert (block.attention, block.attention_measured) == (own.linearised, own.measured)
        assert (block.cross, block.cross_measured) == (cross.linearised, cross.measured)
        assert (block.heads.count, block.heads.kv_heads) == (8, 8)
    [plan] = report_of(model, given, measure=0, probes=2, granularity="attention", remove=0.9).plans
    layers = [block.layer for block in model.get_decoder().block]
    both = [(one[0].SelfAttention, one[1].EncDecAttention) for one in layers]
    gone = [both[int(block)][int(index)] for _, block, _, index in (name.split(".") for name in plan.set)]
    assert plan.parameters == sum(p.numel() for attention in gone for p in attention.parameters())


def test_local_of_a_head_of_cross_attention_is_dense_arithmetic() -> None:
    """What it adds to the stream, relative to the stream behind it; T5's block has no norm there."""
    model, given = model_of("t5"), inputs_of("t5")[:1]
    own, layer = written(model, given[0]), model.get_decoder().block[1].layer[1]
    seen = dict[str, Tensor]()
    layer.EncDecAttention.o.register_forward_pre_hook(lambda _m, args: seen.update(heads=args[0][0]))
    layer.register_forward_hook(lambda _m, _args, out: seen.update(stream=out[0][0]))
    report = report_of(model, given, measure=0, probes=2, granularity="head,block")
    logits(model, given[0], own)
    weight, width = layer.EncDecAttention.o.weight, seen["heads"].shape[1] // 4
    for term in report.terms:
        if term.kind == "head" and term.block == 1 and "EncDec" in term.module:
            assert term.index is not None
            place = slice((term.index - 4) * width, (term.index - 3) * width)
            added = seen["heads"][:, place] @ weight[:, place].T.detach()
            assert term.local == pytest.approx(float(added.norm() / seen["stream"].norm()), rel=1e-6)


@pytest.mark.parametrize("metric", ["nll", "hidden"])
def test_other_metrics_are_what_hooks_say(metric: Any) -> None:
    model, given = model_of("bart"), inputs_of("bart")[:1]
    own = written(model, given[0])
    report = report_of(model, given, measure=2, probes=8, metric=metric)

    def output() -> Tensor:
        with no_grad():
            out = model(**given[0], decoder_input_ids=own, use_cache=False, output_hidden_states=True)
        found: Tensor = out.logits[0] if metric == "nll" else out.decoder_hidden_states[-1]
        return found

    before = output()
    for term in report.terms:
        if term.measured is None:
            continue
        with without(model, report, [term]):
            after = output()
        if metric == "nll":
            want = float(cross_entropy(after[:-1], own[0, 1:]) - cross_entropy(before[:-1], own[0, 1:]))
        else:
            want = float((after - before).norm() / before.norm())
        assert term.measured == pytest.approx(want, rel=1e-7, abs=1e-11)


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks in the encoder, three in the decoder."""
    return save_t5(tmp_path_factory.mktemp("t5"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bart", "block"), ("bart", "neuron"), ("bart", "head"), ("encoder-decoder", "block"),
     ("encoder-decoder", "attention"), ("t5", "block"), ("t5", "neuron"), ("t5", "head"), ("t5", "attention")],
)  # fmt: skip
def test_a_checkpoint_without_a_set_does_what_hooks_say(name: str, kind: str, t5: Path, tmp_path: Path) -> None:
    folder = t5
    if name != "t5":
        folder = tmp_path / name
        started(tiny_model(name)).save_pretrained(folder)
    file, own = tmp_path / "ids.jsonl", torch.tensor([[3, 45, 56, 67]])
    file.write_text(json.dumps({"input_ids": IDS[0]}))
    words = ["prune-bound", str(folder), "--stack", "decoder", "--prompts", str(file), "--granularity", kind, "-q"]
    words += ["--set", "1" if kind == "block" else "2", "--effort", "quick", "--dtype", "float64", "--json"]
    report, chosen = tmp_path / "report.json", tmp_path / "set.json"
    assert run([*words, "--apply", str(tmp_path / "less"), "--export", str(chosen), "-o", str(report)]) == 0
    found = PruneReport.model_validate_json(report.read_text())
    assert found.written is not None
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).double().eval()
    less = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "less").double().eval()
    gone = [(one["kind"], one["block"], one["index"]) for one in json.loads(chosen.read_text())["terms"]]
    terms = [term for term in found.terms if (term.kind, term.block, term.index) in gone]
    given = {"input_ids": torch.tensor([IDS[0]])}
    with without(model, found, terms):
        want = logits(model, given, own)
    assert torch.allclose(logits(less, given, own), want, rtol=1e-9, atol=1e-9)
    assert found.written.parameters_before == sum(p.numel() for p in model.parameters())
    names = dict(model.named_modules())
    assert all(one["module"] in names for one in json.loads(chosen.read_text())["terms"])
    first = found.written.removed_blocks == [] and kind == "block" and name == "t5"
    assert first == ("block.0" in str(terms[0].module) and name == "t5" and kind == "block")  # all blocks use its table
    if kind == "block" and not first:
        assert sum(p.numel() for p in less.parameters()) == found.written.parameters_after
        assert "--stack decoder" in (tmp_path / "less" / "README.md").read_text()
        assert len(found.written.removed_blocks) == len(written(less, given)) == 1


def test_weights_read_block_by_block_give_the_same(t5: Path, tmp_path: Path) -> None:
    words = ["prune-bound", str(t5), "--stack", "decoder", "--prompt", "abcdef", "--decoder-prompt", "world"]
    words += ["--effort", "quick", "-q", "--json", "-o"]
    assert run([*words, str(tmp_path / "resident.json")]) == 0
    with streaming():
        assert run([*words, str(tmp_path / "streamed.json")]) == 0
    resident, streamed = (
        PruneReport.model_validate_json((tmp_path / f"{name}.json").read_text()) for name in ("resident", "streamed")
    )
    assert (resident.streamed, streamed.streamed) == (False, True)
    for name in ("terms", "blocks", "plans", "eq16", "protocol"):
        assert getattr(resident, name) == getattr(streamed, name)


def test_repair_and_means(tmp_path: Path) -> None:
    tiny_model("bart").save_pretrained(tmp_path / "bart")
    file = tmp_path / "ids.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in IDS))
    words = ["prune-bound", str(tmp_path / "bart"), "--stack", "decoder", "--prompts", str(file), "-q"]
    words += ["--effort", "quick", "--granularity", "head", "--set", "2", "--json"]
    for option in (["--repair"], ["--ablate", "mean"]):
        folder, report = tmp_path / option[0].strip("-"), tmp_path / "report.json"
        assert run([*words, *option, "--apply", str(folder), "-o", str(report)]) == 0
        found = json.loads(report.read_text())["written"]
        assert found["error"] < 1e-5
        assert found["damage"] >= 0


def test_an_encoder_s_metric_names_the_decoder(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune-bound", str(t5), "--prompt", "ab", "--metric", "kl", "-q"]) == 2
    assert capsys.readouterr().err.endswith("use --metric hidden or --stack decoder\n")
