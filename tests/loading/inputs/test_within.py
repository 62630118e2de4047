"""Pictures within a text: every kind of model is exact on both at once, and what cannot be read is said in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attributing import WORDS
from paging import differing, in_parts, whole
from picture_texts import HEARD, KINDS, MARK, VIDEO_MARK, build, inputs, save_llava, video_inputs
from safetensors.torch import save_file
from torch import Tensor

from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.analysis.matrix.run import matrix
from duat_cli.analysis.prepared import Prepared, as_prompts, within_texts
from duat_cli.errors import ForwardError, InputError, UnsupportedModelError
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.loading.inputs.within import DEFAULT, pieces_of
from duat_cli.loading.model.load import LoadedModel, skeleton
from duat_cli.loading.texts import PromptText

SEAMED = "qwen3_vl"  # adds features of pictures behind its first block
BROKEN = {"llama4": ("5.24.0", "no attribute 'image_outputs'")}  # its forward pass fails in that release


def quiet(*_: Any) -> None:
    pass


def given(name: str, loaded: LoadedModel) -> tuple[LoadedModel, list[Any]]:
    tensors = inputs(name, loaded.model)
    found = [Prepared("here", one, None, PromptText("", "here", 1)) for one in (tensors, inputs(name, loaded.model, 1))]
    return replace(loaded, like=tensors), as_prompts(loaded, found)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_exact(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    loaded, prompts = given(name, whole(tmp_path))
    release, said = BROKEN.get(name, ("", ""))
    if transformers.__version__ == release:
        with pytest.raises(ForwardError, match=f"{said}.*read its parts by --stack vision, text or all"):
            verify(loaded, prompts, quiet)
        return
    report = verify(loaded, prompts, quiet)
    assert report.certificate.relative_error < 1e-5
    assert report.certificate.plain_error == 0.0  # the sum is of the model's own pass on both
    assert [len(report.blocks), report.prompts[0].tokens] == [3, prompts[0].input_ids.shape[1]]
    assert all(block.operator_error is not None and block.operator_error < 1e-5 for block in report.blocks)
    assert all("runs as well; what it gives is taken as it is" in entry.why for entry in report.skipped)


def test_the_operator_is_the_dense_matrix(tmp_path: Path) -> None:
    build("gemma3").save_pretrained(tmp_path)  # its mask lets pieces of a picture see each other
    loaded, prompts = given("gemma3", whole(tmp_path, "float64"))
    report = matrix(loaded, prompts[0], 1, str, quiet)
    assert report.dense
    # its norms round to float32 whatever they are given
    assert all(check.holds and check.relative_error < 1e-7 for check in report.checks if check.holds is not None)


@pytest.mark.parametrize("name", ["llava", SEAMED])
def test_read_block_by_block_every_number_is_the_same(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)

    def report(loaded: LoadedModel) -> list[dict[str, Any]]:
        options = InspectOptions(cache=False, null="all", terms=True)
        return [inspect(*given(name, loaded), options, quiet).model_dump(mode="json", exclude={"run"})]

    expected = report(whole(tmp_path))
    assert expected[0]["blocks"][0]["null"]["reinitialised"] is not None
    with in_parts(tmp_path) as loaded:
        assert differing(report(loaded), expected) == []


def test_features_between_blocks_are_a_part(tmp_path: Path) -> None:
    build(SEAMED).save_pretrained(tmp_path)
    loaded, prompts = given(SEAMED, whole(tmp_path))
    first, second, _ = inspect(loaded, prompts, InspectOptions(cache=False, null="uniform"), quiet).blocks
    assert first.terms is not None
    assert second.terms is not None
    assert first.terms.encoder is None
    assert second.terms.encoder is not None
    with pytest.raises(UnsupportedModelError, match="adds features of pictures to the stream between blocks"):
        attribute(loaded, prompts, WORDS, AttributeOptions(Asked()), quiet)


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_what_a_picture_adds_to_a_logit(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    loaded, prompts = given(name, whole(tmp_path))
    report = attribute(loaded, prompts[:1], WORDS, AttributeOptions(Asked(target="t40")), quiet)
    assert report.certificate.exact
    [one] = report.attribution
    parts, pieces = one.parts, [t for t in one.parts.tokens if t.text.startswith("<image ")]
    assert one.logit == pytest.approx(float(loaded.model(**prompts[0].given).logits[0, -1, 40]), abs=1e-5)
    added = sum(t.value for t in parts.tokens) + parts.static.value + sum(u.value for u in parts.units)
    assert added + parts.head_bias == pytest.approx(one.logit, abs=1e-4)
    assert [piece.position for piece in pieces] == (prompts[0].input_ids[0] == MARK).nonzero().flatten().tolist()
    assert parts.picture is not None
    assert parts.picture.positions == len(pieces)
    assert parts.picture.value == pytest.approx(sum(piece.value for piece in pieces), abs=1e-5)
    with pytest.raises(InputError, match="not of pictures within a text yet"):
        attribute(loaded, prompts, WORDS, AttributeOptions(Asked(), measure=2), quiet)


def test_a_video_alone_is_read_and_its_pieces_are_named(tmp_path: Path) -> None:
    build("qwen2_5_vl").save_pretrained(tmp_path)
    loaded = whole(tmp_path)
    tensors = video_inputs(loaded.model)
    [prompt] = as_prompts(loaded, [Prepared("here", tensors, None, PromptText("", "here", 1))])
    assert pieces_of(loaded.model.config) == {MARK: "image", VIDEO_MARK: "video"}
    assert prompt.pieces == dict.fromkeys(range(3, 19), "video")
    report = attribute(replace(loaded, like=tensors), [prompt], WORDS, AttributeOptions(Asked(target="t40")), quiet)
    assert report.certificate.exact
    [one] = report.attribution
    assert [t.text for t in one.parts.tokens[3:19]] == [f"<video {k}>" for k in range(1, 17)]
    assert not any(t.text.startswith("<video") for t in (*one.parts.tokens[:3], *one.parts.tokens[19:]))
    assert one.parts.picture is not None
    assert one.parts.picture.value == pytest.approx(sum(t.value for t in one.parts.tokens[3:19]), abs=1e-5)


def test_the_checkpoints_own_processor_makes_the_input(tmp_path: Path) -> None:
    save_llava(tmp_path)
    shell = skeleton(whole(tmp_path).files)
    files = InputFiles(images=(picture(tmp_path),))

    def read(*texts: str) -> list[Prepared]:
        own = [PromptText(text, f"--prompt {k}", k) for k, text in enumerate(texts, 1)]
        return within_texts(shell, tmp_path, files, own, trust=False)

    one, two = read("USER <image> What is in the picture ?", "a <image>")
    assert [one.positions, two.positions] == [7 + 16, 1 + 16]
    assert int((one.tensors["input_ids"] == MARK).sum()) == 16
    assert torch.equal(one.tensors["pixel_values"], two.tensors["pixel_values"])
    [asked] = read()
    assert asked.text is not None
    assert [asked.text.where, asked.text.text] == [DEFAULT, "<image>\nWhat is in the picture?"]
    for text in ("a cat", "<image> <image>"):
        with pytest.raises(InputError, match="--prompt 1: the checkpoint's processor cannot put 1 picture"):
            read(text)


def picture(folder: Path) -> str:
    image = pytest.importorskip("PIL.Image")
    image.effect_noise((20, 24), 64).save(folder / "given.png")
    return str(folder / "given.png")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "text beside tensors": ({"read": [PromptText("a", "--prompt 1", 1)]}, "--inputs: its tensors hold the text"),
    "too long": ({"tensors": {"input_ids": torch.full((1, 300), MARK)}}, "too long, 300 tokens in all"),
    "no text": ({"tensors": {"pixel_values": torch.zeros(1, 3, 16, 16)}}, "it holds pixel_values; "),
    "unknown": ({"tensors": {"ids": torch.zeros(1, 3)}}, "ids: LlavaForConditionalGeneration takes no such argument"),
    "a sound": (
        {"files": InputFiles(sounds=("a.wav",))},
        "--audio: LlavaForConditionalGeneration reads each kind of input",
    ),
}


def test_sound_within_a_text_is_read_from_tensors_alone(tmp_path: Path) -> None:
    model = build(HEARD)
    tensors = inputs(HEARD, model)
    save_file(tensors, tmp_path / "in.safetensors")
    [read] = within_texts(model, tmp_path, InputFiles(tensors=(str(tmp_path / "in.safetensors"),)), [], trust=False)
    assert (read.positions, set(read.tensors)) == (17, {*tensors, "attention_mask"})
    for files, option in ((InputFiles(sounds=("a.wav",)), "--audio"), (InputFiles(images=("a.png",)), "--image")):
        with pytest.raises(InputError) as refused:
            within_texts(model, tmp_path, files, [], trust=False)
        assert str(refused.value) == (
            f"{option}: Qwen2AudioForConditionalGeneration reads audio within a text; give the tensors that its "
            "processor makes of both with --inputs"
        )


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_said_in_one_line(case: str, tmp_path: Path) -> None:
    asked, said = BAD[case]
    tensors: dict[str, Tensor] = asked.get("tensors", {"input_ids": torch.full((1, 20), MARK)})
    save_file(tensors, tmp_path / "in.safetensors")
    files = asked.get("files", InputFiles(tensors=(str(tmp_path / "in.safetensors"),)))
    with pytest.raises(InputError) as refused:
        within_texts(build("llava"), tmp_path, files, asked.get("read", []), trust=False)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
