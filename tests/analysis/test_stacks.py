"""Decoders of encoder-decoders: what they read, and the sum with the encoder's part against dense arithmetic."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bad_checkpoints
import image_models
import pytest
import torch
from attributing import WORDS
from decoders import IDS, OWN, attentions, given_to, save_t5, through
from helpers import as_loaded, prompt_of, single_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    SpeechT5Config,
    SpeechT5ForTextToSpeech,
    T5Config,
    T5ForSequenceClassification,
)

from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked
from duat_cli.analysis.decomposition import Carried, Decomposition
from duat_cli.analysis.stacks import STEPS, with_chosen_blocks
from duat_cli.cli.main import run
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.models.arrays import relative_error
from duat_cli.models.discovery.causality import decoder_logits, run_pair
from duat_cli.models.discovery.modality import STATES, decoder_of, stack_of
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.discovery.structure import Discovery, run_stack
from duat_cli.models.discovery.unread import ENCODER_ALONE
from duat_cli.models.instrument.rig import BlockRun


def decomposed(model: Any) -> tuple[list[Carried], list[Tensor], dict[str, Tensor]]:
    """The pieces behind every block of its decoder, the outputs, and what the decoder was run on."""
    decomposition, pieces, outputs = Decomposition(), list[Carried](), list[Tensor]()

    def listen(run: BlockRun, _block: ProvedBlock) -> None:
        assert decomposition.advance(run).terms.error < 1e-12
        assert decomposition.carried is not None
        pieces.append(decomposition.carried)
        outputs.append(run.output[0])

    through(model, listen)
    return pieces, outputs, given_to(model)


@dataclass
class Dense:
    """The pieces of a stream, carried with written-out weights."""

    linear: Tensor
    static: Tensor
    encoder: Tensor  # by state of the encoder, (K, N, M)
    dynamic: Tensor

    @property
    def total(self) -> Tensor:
        return self.linear + self.static + self.encoder.sum(0) + self.dynamic

    def each(self, function: Any, bias: Any = 0.0) -> Dense:
        """A linear map of every piece; `bias` is the constant beside it."""
        return Dense(
            function(self.linear), function(self.static) + bias, function(self.encoder), function(self.dynamic)
        )

    def plus(self, other: Dense) -> Dense:
        return Dense(*(getattr(self, n) + getattr(other, n) for n in ("linear", "static", "encoder", "dynamic")))


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """H V head by head: (heads, N, K), (..., K, heads d) to (..., N, heads d)."""
    by_head = values.unflatten(-1, (len(weights), -1))
    return torch.einsum("hnk,...khd->...nhd", weights, by_head).flatten(-2)


def by_hand_t5(model: Any, given: dict[str, Tensor]) -> list[Dense]:
    decoder, states = model.get_decoder(), given[STATES][0]
    with torch.no_grad():
        x = decoder.embed_tokens(OWN)[0]
    out = attentions(model)
    zero, found = torch.zeros_like(x), []
    here = Dense(x, zero, zero[None], zero)
    apart = torch.diag_embed(torch.ones(len(states)).double())[..., None] * states  # (K, K, width), one state each

    def normed(norm: Any) -> Any:
        # T5 takes the variance in float32, whatever the dtype
        scale = (here.total.float().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return here.each(lambda piece: piece * scale * norm.weight)

    for k, block in enumerate(decoder.block):
        own, cross, last = block.layer
        attention, other = own.SelfAttention, cross.EncDecAttention
        here = here.plus(
            normed(own.layer_norm).each(
                lambda p, a=attention, H=out.attentions[k][0]: mixed(H, p @ a.v.weight.T) @ a.o.weight.T
            )
        )
        added = mixed(out.cross_attentions[k][0], apart @ other.v.weight.T) @ other.o.weight.T
        here = here.plus(Dense(zero, zero, added, zero))
        ffn = last.DenseReluDense(normed(last.layer_norm).total[None])[0]
        here = here.plus(Dense(zero, zero, zero[None], ffn))
        found.append(here)
    return found


def by_hand_bart(model: Any, given: dict[str, Tensor]) -> list[Dense]:
    """Post-norm, with biases everywhere; what an FFN's last bias adds is static, the rest dynamic."""
    decoder, states, inputs = model.get_decoder(), given[STATES][0], []
    with decoder.layers[0].register_forward_pre_hook(lambda _m, args: inputs.append(args[0][0])):
        out = attentions(model)
    zero = torch.zeros_like(inputs[0])
    here, found = Dense(inputs[0], zero, zero[None], zero), []

    def normed(before: Dense, norm: nn.LayerNorm) -> Dense:
        whole = before.total
        scale = (whole.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
        return before.each(lambda p: (p - p.mean(-1, keepdim=True)) * scale * norm.weight, norm.bias)

    for layer, own, cross in zip(decoder.layers, out.attentions, out.cross_attentions, strict=True):
        a, c = layer.self_attn, layer.encoder_attn
        constant = a.v_proj.bias @ a.out_proj.weight.T + a.out_proj.bias  # rows of H sum to 1
        added = here.each(lambda p, a=a, H=own[0]: mixed(H, p @ a.v_proj.weight.T) @ a.out_proj.weight.T, constant)
        here = normed(here.plus(added), layer.self_attn_layer_norm)
        constant = (c.v_proj.bias @ c.out_proj.weight.T + c.out_proj.bias).expand_as(zero)
        seen = mixed(cross[0], states @ c.v_proj.weight.T) @ c.out_proj.weight.T
        here = normed(here.plus(Dense(zero, constant, seen[None], zero)), layer.encoder_attn_layer_norm)
        up = layer.activation_fn(layer.fc1(here.total)) @ layer.fc2.weight.T
        here = normed(here.plus(Dense(zero, layer.fc2.bias.expand_as(zero), zero[None], up)), layer.final_layer_norm)
        found.append(here)
    return found


@pytest.mark.parametrize(("model_type", "by_hand"), [("t5", by_hand_t5), ("bart", by_hand_bart)])
def test_the_pieces_are_those_of_dense_arithmetic(model_type: str, by_hand: Any) -> None:
    model = single_model(model_type).double()
    pieces, outputs, given = decomposed(model)
    with torch.no_grad():
        truth = by_hand(model, given)
    for mine, dense, output in zip(pieces, truth, outputs, strict=True):
        assert mine.encoder is not None
        assert relative_error(dense.total, output) < 1e-12
        dense.encoder = dense.encoder.sum(0)
        for name in ("linear", "encoder", "dynamic"):
            assert relative_error(getattr(mine, name), getattr(dense, name)) < 1e-10, name
        static = torch.zeros_like(output) if mine.static is None else mine.static
        assert float((static - dense.static).norm()) < 1e-10 * float(output.norm())
    assert float(truth[-1].encoder.norm()) > 0.05 * float(outputs[-1].norm())  # a part that matters


def test_what_states_of_the_encoder_add_to_a_logit_is_dense_arithmetic() -> None:
    model = single_model("t5").double()
    given = given_to(model)
    with torch.no_grad():
        last = by_hand_t5(model, given)[-1]
        norm = model.decoder.final_layer_norm
        scale = (last.total.float().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        size = model.model_dim**-0.5 if model.config.scale_decoder_outputs else 1.0
        logits = (last.encoder * scale * norm.weight * size) @ model.lm_head.weight.T  # (K, N, vocabulary)
    loaded = replace(as_loaded(model), model=decoder_of(model), pair=model, stack="decoder", like=given)
    prompt = replace(prompt_of(OWN), prepared=given, source=prompt_of(IDS))
    options = AttributeOptions(Asked(position="all"))
    report = attribute(loaded, [prompt], WORDS, options, lambda *_: None)
    assert report.certificate.residual < 1e-10
    assert [t.text for t in report.attribution[0].parts.encoder.tokens] == [f"t{k} " for k in IDS[0].tolist()]
    for one in report.attribution:
        found = one.parts.encoder
        wanted = logits[:, one.position, one.target.token.id]
        assert relative_error(torch.tensor([t.value for t in found.tokens]).double(), wanted) < 1e-6
        assert sum(found.blocks) == pytest.approx(found.value) == pytest.approx(float(wanted.sum()))
        straight = sum(h.value for h in one.direct.heads) + sum(u.value for u in one.direct.units) + one.direct.tokens
        assert straight + found.direct + one.direct.static == pytest.approx(one.logit)  # T5's head has no bias


def test_a_decoder_is_attributed_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["attribute", str(folder), "--prompt", "abc"]
    code, out, _ = answered([*words, "--stack", "decoder", "--decoder-prompt", "xyz"], capsys)
    assert code == 0
    assert "(T5Stack, decoder stack)" in out
    assert "By token of the encoder" in out
    for more, said in (
        ([], "what it puts out is its decoder's; give --stack decoder"),
        (["--stack", "decoder", "--steps", "1"], "not of a decoder yet"),
        (["--stack", "encoder"], "--stack encoder: duat attribute reads text, with pictures or without, and a decoder"),
    ):
        code, out, err = answered([*words, *more], capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_a_head_that_reads_the_encoders_tokens_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A class is read where the text ends, which its own forward looks for among the encoder's tokens."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 259}
    torch.manual_seed(3)
    T5ForSequenceClassification(T5Config(vocab_size=264, pad_token_id=259, eos_token_id=257, **shape)).save_pretrained(
        tmp_path
    )
    bad_checkpoints.tokenizer(tmp_path)
    words = [str(tmp_path), "--stack", "decoder", "--prompt", "abc"]
    code, out, _ = answered(["check", *words, "--json"], capsys)
    assert code in (0, 1)
    assert json.loads(out)["behaviour"]["loss_per_token"] is None
    code, out, err = answered(["attribute", *words], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "its head takes more than its encoder's states and its decoder's tokens" in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t5(tmp_path_factory.mktemp("t5"))


def answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run([*words, "-q"])
    return code, *capsys.readouterr()


def test_a_config_without_a_start_token_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's own rule for labels then fails, and so does its writing."""
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((bare / name).read_text())
        del fields["decoder_start_token_id"]
        (bare / name).write_text(json.dumps(fields))
    for more in ([], ["--decoder-prompt", "xyz"]):
        code, out, err = answered(["verify", str(bare), "--stack", "decoder", "--prompt", "abc", *more], capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "names no decoder_start_token_id; add it to config.json" in err


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_what_the_model_writes_is_the_likeliest_each_time(model_type: str) -> None:
    """BART forces an end at the limit that is asked for, and T5's start token stands in its config alone."""
    model = single_model(model_type)
    if model_type == "t5":
        model.config.decoder_start_token_id = 1
    else:
        assert model.generation_config.forced_eos_token_id is not None
    _, [prompt] = with_chosen_blocks(as_loaded(model), [prompt_of(IDS)], InputFiles(stack="decoder"))
    written = torch.tensor([[1]])
    with torch.no_grad():
        while written.shape[1] < STEPS + 1:
            last = model(input_ids=IDS, decoder_input_ids=written).logits[:, -1]
            written = torch.cat([written, last.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(prompt.input_ids, written)


def test_verify_reads_the_decoder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(folder), "--stack", "decoder", "--prompt", "abcdef", "--decoder-prompt", "xyz", "--json"]
    code, out, _ = answered(words, capsys)
    report = json.loads(out)
    assert code == 0
    assert report["model"]["architecture"] == "T5Stack"
    assert len(report["blocks"]) == 3  # the encoder has two
    assert report["prompts"][0]["tokens"] == 3  # the start token, then labels but for the last
    assert report["certificate"]["relative_error"] < 1e-5
    assert report["certificate"]["plain_error"] == 0.0
    assert "it reads the tokens of --decoder-prompt but for the last, 'z'" in report["warnings"][-1]


def test_all_is_a_report_of_each_stack(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder), "--prompt", "abcdef", "--decoder-prompt", "xyz", "--stack"]
    code, out, _ = answered(["verify", *words, "all", "--json"], capsys)
    encoder, decoder = json.loads(out)["stacks"]
    assert code == 0
    assert [encoder["model"]["stack"], decoder["model"]["stack"]] == ["encoder", "decoder"]
    assert decoder["blocks"] == json.loads(answered(["verify", *words, "decoder", "--json"], capsys)[1])["blocks"]
    alone = json.loads(answered(["verify", *words[:3], "--json"], capsys)[1])
    assert encoder["blocks"] == alone["blocks"]
    assert len(encoder["blocks"]) == 2
    assert [part["skipped"] for part in (encoder, decoder)] == [[], []]
    [skipped] = alone["skipped"]
    assert skipped["why"].startswith("decoder stack")
    saved, page = tmp_path / "both.json", tmp_path / "both.html"
    answered(["inspect", *words, "all", "--null", "uniform", "-o", str(saved)], capsys)
    assert answered(["report", str(saved), "-o", str(page)], capsys)[0] == 0
    assert all(f"{stack} stack)" in page.read_text() for stack in ("encoder", "decoder"))


@pytest.mark.parametrize("name", ["whisper", "moonshine", "speecht5", "speech of two models", "pictures of two models"])
def test_a_decoder_of_sound_or_pictures_is_run_as_in_its_model(name: str) -> None:
    model, given = image_models.build(name), image_models.CASES[name][1]()
    with torch.no_grad():
        states = run_stack(stack_of(model), given)[0]
        own = {"input_ids": OWN, STATES: states}
        output = run_stack(stack_of(decoder_of(model)), own)
        whole = model(**given, decoder_input_ids=OWN, output_hidden_states=True)
    assert torch.equal(output[0], whole.decoder_hidden_states[-1])
    assert torch.equal(run_pair(model, own).logits, whole.logits)
    behind = decoder_logits(model, decoder_of(model), output, own)
    assert behind is not None
    assert torch.equal(behind, whole.logits[0])


def test_a_layer_between_encoder_and_decoder_is_refused() -> None:
    """It projects the states where the two have other widths: what the decoder reads is not what the encoder gives."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    decoder = BertConfig(hidden_size=8, is_decoder=True, add_cross_attention=True, **small)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(hidden_size=12, **small), decoder)
    with pytest.raises(UnsupportedModelError, match=r"a layer between its encoder and its decoder \(enc_to_dec_proj\)"):
        decoder_of(EncoderDecoderModel(config))


def test_where_the_decoder_cannot_be_read_all_is_the_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SpeechT5 that speaks: its encoder takes token ids by the name of sound, and its decoder takes spectrograms.
    ProphetNet's decoder takes token ids, and is refused when it is looked at."""
    for name, model, why in (
        ("speech", SpeechT5ForTextToSpeech(SpeechT5Config(**image_models.SPOKEN)), "is no model that takes token ids"),
        ("prophet", single_model("prophetnet"), "it is not affine"),
    ):
        model.save_pretrained(tmp_path / name)
        bad_checkpoints.tokenizer(tmp_path / name)
        words = ["verify", str(tmp_path / name), "--prompt", "abc"]
        code, out, err = answered([*words, "--stack", "all", "--json"], capsys)
        assert code == 0, err
        [report] = json.loads(out)["stacks"]
        note = next(note for note in report["warnings"] if note.startswith("--stack all: the decoder is not read: "))
        assert why in note
        assert report["blocks"] == json.loads(answered([*words, "--json"], capsys)[1])["blocks"]
        assert report["certificate"]["relative_error"] < 1e-5


def test_each_of_all_stacks_is_discovered_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, proof = list[str](), Discovery.proof
    monkeypatch.setattr(Discovery, "proof", lambda self: found.append(type(self.model).__name__) or proof(self))
    words = ["verify", str(folder), "--prompt", "abc", "--stack", "all", "--json"]
    stacks = [report["model"]["stack"] for report in json.loads(answered(words, capsys)[1])["stacks"]]
    assert stacks == ["encoder", "decoder"]
    assert len(found) == len(set(found)) == 2


def test_no_command_sends_to_a_decoder_that_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SpeechT5ForTextToSpeech(SpeechT5Config(**image_models.SPOKEN)).save_pretrained(tmp_path)
    bad_checkpoints.tokenizer(tmp_path)
    _, out, err = answered(["attribute", str(tmp_path), "--prompt", "abc"], capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith("what it puts out is its decoder's, which duat cannot read by itself\n")
    [skipped] = json.loads(answered(["verify", str(tmp_path), "--prompt", "abc", "--json"], capsys)[1])["skipped"]
    assert skipped["why"] == ENCODER_ALONE


def test_inspect_splits_the_stream_into_four(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(folder), "--stack", "decoder", "--prompt", "abcdef", "--null", "uniform", "--terms"]
    code, out, _ = answered([*words, "--json"], capsys)
    report = json.loads(out)
    assert code == 0
    assert report["prompts"][0]["tokens"] == 16  # what the model writes
    for block in report["blocks"]:
        terms = block["terms"]
        assert sum(terms[part]["share"] for part in ("linear", "static", "encoder", "dynamic")) == pytest.approx(1)
        before = terms["pre_activation"]
        assert sum(before[part]["share"] for part in ("linear", "static", "encoder", "dynamic")) == pytest.approx(1)
    assert report["summary"]["encoder_share"] == report["blocks"][-1]["terms"]["encoder"]["share"]
    assert [term["name"] for term in report["terms"]] == ["x_0", "bias", "encoder", "block 0", "block 1", "block 2"]
    assert sum(term["share"] for term in report["terms"]) == pytest.approx(1)
    _, out, _ = answered(words, capsys)
    assert "enc." in out


def test_support_answers_for_both_stacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answered(["support", str(folder)], capsys)
    assert code == 0
    assert "exact" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--decoder-prompt", "x"], "--decoder-prompt: only a decoder reads it; give --stack decoder"),
        (["--stack", "decoder"], "--stack decoder: LlamaForCausalLM is no encoder with a decoder"),
        (["--stack", "all"], "--stack all: LlamaForCausalLM has no two stacks to read; leave it out"),
        (["--stack", "encoder"], "--stack encoder: LlamaForCausalLM is no encoder with a decoder"),
    ],
)
def test_what_no_decoder_is_asked_for_is_one_line(
    words: list[str], said: str, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answered(["verify", str(short / "demo"), *words, "--prompt", "a"], capsys)
    assert (code, out, err) == (2, "", f"duat: error: {said}\n")


@pytest.mark.parametrize(
    "words", [["--out", "kept", "--stack", "decoder"], ["--matrices", "w.safetensors", "--stack", "all"]]
)
def test_what_is_kept_in_files_is_of_one_stack(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answered(["inspect", str(folder), *words, "--prompt", "a"], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "contradict each other" in err


def test_matrix_reads_the_self_attention_of_a_decoder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answered(["matrix", str(folder), "--stack", "decoder", "--prompt", "a"], capsys)
    assert code == 0
    assert "decoder stack" in out
    assert "W'_c of its cross-attention" in " ".join(out.split())
    code, out, err = answered(["matrix", str(folder), "--stack", "decoder", "--prompt", "a", "--network"], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "which Eq. 33 has no matrix for" in err
