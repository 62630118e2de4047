"""Decoders of encoder-decoders compared: W'_c against dense matrices, predictions and patches against plain passes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import bad_checkpoints
import image_models
import pytest
import torch
from decoders import carried, dense_crossing, save_bart, save_t5
from helpers import far
from paging import streaming
from safetensors.torch import save_file
from torch import Tensor, no_grad
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from duat_cli.api.comparing import compare
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.results.compare.report import CompareReport

SOURCES, OWN = ["abcdXYefg", "abcdUVWefghi"], "Le chat"
ALIGNED = [0, 1, 2, 3, 6, 7, 8], [0, 1, 2, 3, 7, 8, 9]  # 'abcd' and 'efg'
CROSS = {"t5": "decoder.block.{}.layer.1.EncDecAttention", "bart": "model.decoder.layers.{}.encoder_attn"}


@pytest.fixture(scope="module", params=list(CROSS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save_t5(folder) if request.param == "t5" else save_bart(folder)


class Plain:
    """A model without duat, in float64, and its outputs for both sources."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").double().eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        labels = torch.tensor([tokenizer(text_target=OWN)["input_ids"]])
        self.own = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        self.ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in SOURCES]
        self.seen = [self.run(ids) for ids in self.ids]

    def run(self, ids: Tensor) -> Any:
        with no_grad():
            return self.model(
                input_ids=ids,
                decoder_input_ids=self.own,
                use_cache=False,
                output_attentions=True,
                output_hidden_states=True,
            )

    def logits(self, number: int) -> Tensor:
        return self.seen[number].logits[0, -1]

    def crossed(self, number: int, module: Any) -> Tensor:
        """What this module gives in the pass of a source."""
        found = []
        handle = module.register_forward_hook(lambda m, args, output: found.append(output[0]))
        self.run(self.ids[number])
        handle.remove()
        return found[0]


def compared(folder: Path, **more: Any) -> CompareReport:
    asked = {"prompts": SOURCES, "stack": "decoder", "decoder_prompt": OWN, "dtype": "float64", "cache": False}
    return compare(folder, **{**asked, **more})


@pytest.fixture(scope="module")
def patched(saved: tuple[str, Path]) -> tuple[CompareReport, Plain]:
    """The report with patches of blocks, and the same model without duat: made once, and only read."""
    return compared(saved[1], patch="blocks"), Plain(saved[1])


def test_predictions_and_the_stream_move_as_whole_models_do(patched: tuple[CompareReport, Plain]) -> None:
    report, plain = patched
    assert report.certificate.exact
    [pair] = report.pairs
    assert pair.aligned == plain.own.shape[1]
    p, q = (plain.logits(k).log_softmax(-1) for k in (0, 1))
    assert pair.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-9)
    before, after = (one.decoder_hidden_states for one in plain.seen)
    assert report.comparison is not None
    for block in report.comparison.blocks[:-1]:  # behind T5's last block its norm comes
        own = zip(after[block.index + 1][0], before[block.index + 1][0], strict=True)
        assert block.output == pytest.approx(statistics.fmean(far(b, a) for b, a in own), rel=1e-9)
    states = [one.encoder_last_hidden_state[0, places] for one, places in zip(plain.seen, ALIGNED, strict=True)]
    moved = {one.name: one.change for one in report.comparison.parameters}
    assert moved["e"] == pytest.approx(far(states[1], states[0]), rel=1e-9)
    assert moved["W'_c"] == max(block.cross.relative for block in report.comparison.blocks if block.cross)
    assert any("W'_c of cross-attention moved most" in sentence for sentence in report.comparison.notable)


@pytest.mark.parametrize("saved", ["t5"], indirect=True)
def test_cross_attention_moves_as_dense_matrices_say(patched: tuple[CompareReport, Plain]) -> None:
    """In T5 it adds to the stream as it is, so that its W'_c is sum_h H_c,h (x) (V_h O_h)^T."""
    report, plain = patched
    assert report.comparison is not None
    for block in report.comparison.blocks:
        module = plain.model.get_submodule(CROSS["t5"].format(block.index))
        A = carried(module)
        H = [one.cross_attentions[block.index][0] for one in plain.seen]
        on = [rows[:, :, places] for rows, places in zip(H, ALIGNED, strict=True)]

        assert block.cross is not None
        assert block.cross.relative == pytest.approx(far(dense_crossing(on[1], A), dense_crossing(on[0], A)), rel=1e-6)
        assert block.cross.relative == pytest.approx(block.cross.routing, rel=1e-9)  # no scale of it moves
        both = zip(on, H, strict=True)
        sizes = [[float(dense_crossing(rows, A).square().sum()) for rows in pair] for pair in both]
        left = [1 - some / every for some, every in sizes]
        assert [block.cross.unaligned_a, block.cross.unaligned_b] == pytest.approx(left, rel=1e-6)
        for head in block.cross.heads:
            a, b = (dense_crossing(rows[[head.head]], A[[head.head]]) for rows in on)
            assert head.relative == pytest.approx(far(b, a), rel=1e-6)
        even = [torch.full_like(some, 1 / rows.shape[-1]) for some, rows in zip(on, H, strict=True)]
        assert block.cross.null.relative == pytest.approx(
            far(dense_crossing(even[1], A), dense_crossing(even[0], A)), rel=1e-6
        )


def test_patched_cross_attention_moves_the_prediction_as_a_hook_does(
    saved: tuple[str, Path], patched: tuple[CompareReport, Plain]
) -> None:
    (name, _), (report, plain) = saved, patched
    assert report.patched is not None
    assert report.patched.holds
    a, b = plain.logits(0), plain.logits(1)
    gained = b.softmax(0) - a.softmax(0)
    first, second = int(gained.argmin()), int(gained.argmax())

    def difference(logits: Tensor) -> float:
        return float(logits[second] - logits[first])

    for block in report.patched.blocks:
        module = plain.model.get_submodule(CROSS[name].format(block.index))
        theirs = plain.crossed(1, module)
        handle = module.register_forward_hook(lambda m, args, output, given=theirs: (given, *output[1:]))
        moved = plain.run(plain.ids[0]).logits[0, -1]
        handle.remove()
        share = (difference(moved) - difference(a)) / (difference(b) - difference(a))
        assert block.cross is not None
        assert block.cross.effect == pytest.approx(share, rel=1e-6, abs=1e-9)
    assert report.patched.whole is not None
    assert report.patched.whole.cross is not None
    assert report.patched.whole.cross.effect == pytest.approx(
        1.0, abs=1e-9
    )  # the decoder reads nothing else that moves
    assert report.patched.whole.cross.kl == pytest.approx(1.0, abs=1e-9)
    assert report.patched.blocks[0].H is not None
    assert report.patched.blocks[0].H.effect == 0.0
    assert report.patched.blocks[1].H is not None
    assert report.patched.blocks[1].H.effect != 0.0


def test_blocks_read_one_by_one_give_the_same(saved: tuple[str, Path]) -> None:
    resident = compared(saved[1], patch="heads")
    with streaming():
        streamed = compared(saved[1], patch="heads")
    assert resident.comparison == streamed.comparison
    assert resident.pairs == streamed.pairs
    assert resident.patched == streamed.patched


@pytest.mark.parametrize("saved", ["t5"], indirect=True)
def test_several_pairs_have_a_mean(saved: tuple[str, Path], patched: tuple[CompareReport, Plain]) -> None:
    report = compared(saved[1], prompts=[SOURCES[0], "abcdefgh", SOURCES[1]], per_prompt=True)
    alone, _ = patched
    assert report.comparison is not None
    assert alone.comparison is not None
    for number, block in enumerate(report.comparison.blocks):
        each = [pair.blocks[number].cross for pair in report.pairs if pair.blocks]
        assert each[1] == alone.comparison.blocks[number].cross
        assert block.cross is not None
        values = [one.relative for one in each if one is not None and one.relative is not None]
        assert block.cross.relative == pytest.approx(sum(values) / 2, rel=1e-12)
        assert len(values) == 2
        assert len(block.cross.heads) == 4


def test_sources_without_a_common_token_have_a_reason(tmp_path: Path) -> None:
    report = compared(save_t5(tmp_path), prompts=["ab", "xyz"])
    assert report.comparison is not None
    for block in report.comparison.blocks:
        assert block.cross is not None
        assert block.cross.relative is None
        assert "no token of one is in the other" in block.cross.reasons["relative"]
        assert block.bias is not None
    by_place = compared(tmp_path, prompts=["ab", "xy"], align="position")
    assert by_place.comparison is not None
    assert all(block.cross and block.cross.relative for block in by_place.comparison.blocks)


def test_of_a_block_whose_own_attention_stays_only_cross_attention_is_notable(tmp_path: Path) -> None:
    report = compared(save_t5(tmp_path), layers=0)
    assert report.comparison is not None
    assert report.comparison.blocks[0].operator.relative == 0.0
    assert [sentence.partition(" moved")[0] for sentence in report.comparison.notable] == [
        "block 0: W'_c of cross-attention"
    ]


def test_two_sounds_are_compared_place_by_place(tmp_path: Path) -> None:
    model = image_models.build("whisper")
    model.save_pretrained(tmp_path / "model")
    bad_checkpoints.tokenizer(tmp_path / "model")
    given = image_models.CASES["whisper"][1]()
    files = []
    for number in range(2):
        files.append(str(tmp_path / f"{number}.safetensors"))
        save_file({key: value + 0.3 * number * torch.randn(value.shape) for key, value in given.items()}, files[-1])
    report = compare(tmp_path / "model", inputs=files, stack="decoder", decoder_prompt="ab", patch="blocks")
    assert report.certificate.exact
    assert report.comparison is not None
    assert all(block.cross and block.cross.relative for block in report.comparison.blocks)
    assert report.patched is not None
    assert report.patched.whole is not None
    assert report.patched.whole.cross is not None
    assert report.patched.whole.cross.effect == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"decoder_prompt": None, "prompts": ["A_cat", "b_dog"]}, "with --decoder-prompt TEXT the decoder reads one"),
        ({"prompts": None, "shared": "x", "prefixes": ["y"]}, "--shared: the encoder reads it"),
    ],
)
def test_what_cannot_be_compared_is_refused(asked: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why):
        compared(save_t5(tmp_path), **asked)


def test_tokens_of_a_decoder_are_not_all_that_its_blocks_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="blocks read more of the input than the stream"):
        compared(save_t5(tmp_path), patch="tokens")
