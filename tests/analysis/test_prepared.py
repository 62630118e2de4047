"""Images and sound: every kind of encoder is exact on prepared inputs, in memory and read block by block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from helpers import as_loaded, prompt_of, quiet
from image_models import CASES, SMALL, build, picture
from paging import differing, in_parts, whole
from safetensors.torch import save_file
from torch import Tensor

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.analysis.matrix.run import matrix
from duat_cli.analysis.opening import PromptRequest
from duat_cli.analysis.prepared import Prepared, as_prompts, asked_inputs, prepared_inputs
from duat_cli.analysis.stacks import all_chains, chosen_stack, part_of, parts_of, with_chain
from duat_cli.analysis.support import examine, support_of
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.loading.model.load import LoadedModel, skeleton
from duat_cli.models.discovery.modality import is_pair
from duat_cli.zoo import tiny

STREAMED = ["dinov3_vit", "swin", "whisper"]


def saved(name: str, folder: Path) -> Path:
    build(name).save_pretrained(folder)
    return folder


def given(loaded: LoadedModel, tensors: dict[str, Tensor]) -> tuple[LoadedModel, list[Any]]:
    other = {k: v + 0.1 if v.is_floating_point() else v for k, v in tensors.items()}
    loaded = replace(loaded, like=tensors)
    return loaded, as_prompts(loaded, [Prepared("one", tensors, None), Prepared("two", other, None)])


@pytest.mark.parametrize("files", [InputFiles(), InputFiles(images=("a.png",))])
def test_what_is_no_text_is_not_cut(files: InputFiles, tmp_path: Path) -> None:
    """It is said before anything is read or built."""
    cut = PromptRequest(None, None, 3, files)
    with pytest.raises(InputError, match="--max-tokens: pictures, sounds and texts with pictures are read whole"):
        asked_inputs(t.ViTModel, build, tmp_path, cut, files, [], trust_remote_code=False)
    assert asked_inputs(t.LlamaModel, build, tmp_path, cut, InputFiles(), [], trust_remote_code=False) == []


@pytest.mark.parametrize("name", CASES)
def test_every_kind_is_exact(name: str) -> None:
    torch.manual_seed(5)
    entry = examine(build(name).eval().requires_grad_(False), like=CASES[name][1]())
    pooled = "head.attention (MultiheadAttention) attends to what the blocks put out and was not read"
    assert entry.reason is None
    assert entry.parts == ([pooled] if name.startswith("siglip") else [])
    assert entry.relative_error is not None
    assert entry.relative_error < 1e-5


def test_float64_is_exact_to_its_own_rounding(tmp_path: Path) -> None:
    loaded, prompts = given(whole(saved("vit", tmp_path), "float64"), picture())
    report = verify(loaded, prompts, quiet)
    assert report.certificate.relative_error < 1e-12
    assert all(block.operator_error is not None and block.operator_error < 1e-10 for block in report.blocks)


def test_the_operator_is_the_dense_matrix(tmp_path: Path) -> None:
    loaded, prompts = given(whole(saved("vit", tmp_path), "float64"), picture())
    report = matrix(loaded, prompts[0], 1, lambda position: f"#{position}", quiet)
    assert report.dense
    assert report.tokens == 17
    assert all(check.holds and check.relative_error < 1e-9 for check in report.checks if check.holds is not None)


@pytest.mark.parametrize("name", STREAMED)
def test_read_block_by_block_every_number_is_the_same(name: str, tmp_path: Path) -> None:
    torch.manual_seed(6)
    tensors, options = CASES[name][1](), InspectOptions(cache=False, null="all", terms=True)

    def reports(loaded: LoadedModel) -> list[dict[str, Any]]:
        loaded, prompts = given(loaded, tensors)
        return [inspect(loaded, prompts, options, quiet).model_dump(mode="json", exclude={"run"})]

    expected = reports(whole(saved(name, tmp_path)))
    assert expected[0]["blocks"][0]["null"]["reinitialised"] is not None
    with in_parts(tmp_path) as loaded:
        assert differing(reports(loaded), expected) == []


@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    tensors, loaded = CASES[name][1](), whole(saved(name, tmp_path))
    names = InputFiles(tensors=(write(tmp_path / "given.safetensors", tensors),))
    [read] = prepared_inputs(skeleton(loaded.files), tmp_path, names, trust_remote_code=False)
    [prompt] = as_prompts(loaded, [read])
    stack = loaded.model.get_encoder() if is_pair(loaded.model) else loaded.model.base_model
    if name == "dinov3_vit":  # its base model is the encoder inside
        stack = loaded.model
    with torch.no_grad():
        states = stack(**tensors)[0]
    most = 64 if name.startswith("swin") else states.shape[1]  # 8 x 8 at first, 4 x 4 in the end
    most = 16 if name == "sam" else most  # a map of 4 x 4
    assert prompt.input_ids.tolist() == [list(range(most))]
    assert read.positions in (None, most)


def write(path: Path, tensors: dict[str, Tensor]) -> str:
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    return str(path)


def test_one_digest_an_input(tmp_path: Path) -> None:
    loaded = whole(saved("vit", tmp_path))
    first, second = given(loaded, picture())[1]
    assert first.sha256 == given(loaded, picture())[1][0].sha256 != second.sha256


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "another name": ({"pixels": torch.zeros(1, 3, 16, 16)}, "pixels: ViTForImageClassification takes no such argument"),
    "not what it reads": ({"bool_masked_pos": torch.zeros(1, 16)}, "it holds bool_masked_pos; "),
    "nothing": ({}, "it holds nothing; ViTForImageClassification reads `pixel_values`"),
    "a batch": ({"pixel_values": torch.zeros(2, 3, 16, 16)}, "pixel_values has shape [2, 3, 16, 16]; expected 1"),
    "not finite": ({"pixel_values": torch.full((1, 3, 16, 16), torch.nan)}, "values that are not finite"),
    "another size": ({"pixel_values": torch.zeros(1, 3, 9, 9)}, "ViTForImageClassification cannot read it: ValueError"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_input_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    tensors, said = BAD[case]
    loaded = whole(saved("vit", tmp_path))
    file = write(tmp_path / "given.safetensors", tensors)
    with pytest.raises(InputError) as refused:
        as_prompts(
            loaded,
            prepared_inputs(skeleton(loaded.files), tmp_path, InputFiles(tensors=(file,)), trust_remote_code=False),
        )
    assert said in str(refused.value)
    assert file in str(refused.value)
    assert "\n" not in str(refused.value)


def test_patches_without_a_batch(tmp_path: Path) -> None:
    """A part that takes (N, width) and the numbers of patches, by its own names or those of the whole model."""
    model = tiny.tiny_model("qwen2_5_vl")
    assert parts_of(model) == ["vision", "text"]
    part = chosen_stack(model, "vision")
    width = part.patch_embed.proj.weight[0].numel()
    made = {"pixel_values": torch.randn(16, width), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    own = {"hidden_states": made["pixel_values"], "grid_thw": made["image_grid_thw"]}
    loaded = replace(as_loaded(part), like=own)
    found = []
    for tensors in (made, own):
        file = write(tmp_path / "given.safetensors", tensors)
        [read] = prepared_inputs(part, tmp_path, InputFiles(tensors=(file,)), trust_remote_code=False)
        assert read.tensors.keys() == own.keys()
        [prompt] = as_prompts(loaded, [read])
        found.append(prompt.sha256)
        assert prompt.input_ids.shape == (1, 16)
    assert found[0] == found[1]
    assert verify(loaded, [prompt], quiet).certificate.relative_error < 1e-5
    with pytest.raises(InputError, match="reads patches of a picture as `hidden_states`, and no preprocessor_config"):
        prepared_inputs(part, tmp_path, InputFiles(), trust_remote_code=False)
    with pytest.raises(InputError, match=r"--audio a.wav: Qwen2_5_VisionTransformerPretrainedModel reads images, no"):
        prepared_inputs(part, tmp_path, InputFiles(sounds=("a.wav",)), trust_remote_code=False)


def test_the_part_of_a_model_of_two() -> None:
    config = t.CLIPConfig(text_config={**SMALL, "vocab_size": 264}, vision_config=SMALL, projection_dim=16)
    model = t.CLIPModel(config)
    assert chosen_stack(model, "vision") is model.vision_model or chosen_stack(model, "vision") in model.modules()
    assert type(chosen_stack(model, "vision")).__name__.startswith("CLIPVision")
    assert type(chosen_stack(model, "text")).__name__.startswith("CLIPText")
    assert chosen_stack(model, None) is model
    with pytest.raises(InputError, match="--stack audio: CLIPModel has no part that reads input_features or"):
        chosen_stack(model, "audio")


def test_a_text_and_a_picture_beside_it_are_read_as_prepared_tensors(tmp_path: Path) -> None:
    """BLIP's class states that it reads pictures, and its forward pass demands both; its text has no place for one."""
    model = t.BlipForConditionalGeneration(tiny.tiny_model("blip").config).eval()
    size = model.config.vision_config.image_size
    tensors = {"pixel_values": torch.randn(1, 3, size, size), "input_ids": torch.tensor([[5, 9, 30, 41]])}
    file = write(tmp_path / "both.safetensors", tensors)

    def asked(texts: list[str] | None, files: InputFiles) -> list[Prepared]:
        request = PromptRequest(texts, None, None, files)
        return asked_inputs(type(model), lambda: model, tmp_path, request, files, [], trust_remote_code=False)

    [read] = asked(None, InputFiles(tensors=(file,)))
    loaded = replace(as_loaded(model), like=read.tensors)
    report = verify(loaded, as_prompts(loaded, [read]), quiet)
    assert [prompt.tokens for prompt in report.prompts] == [4]
    assert report.certificate.relative_error < 1e-5
    said = "reads a text and what stands beside it at once; give the tensors of both in one file with --inputs"
    for texts, files in (
        (None, InputFiles()),
        (None, InputFiles(images=("a.png",))),
        (["a"], InputFiles(tensors=(file,))),
    ):
        with pytest.raises(InputError, match=f"{said}, or --stack vision"):
            asked(texts, files)


def test_an_encoder_is_run_within_its_model() -> None:
    """Of a detector: it reads what a convolutional network makes of the picture, beside positions that its queries and
    keys alone are made of."""
    model = tiny.tiny_model("detr")
    like = {"pixel_values": torch.randn(1, 3, 128, 96)}
    entry = examine(model, like=like)
    assert [(stack.stack, stack.status) for stack in entry.stacks] == [("encoder", "exact"), ("decoder", "refused")]
    loaded = replace(as_loaded(model), like=like)
    [prompt] = as_prompts(loaded, [Prepared("one", like, None)])
    assert prompt.input_ids.shape == (1, 12)  # a 32nd of each side
    assert verify(loaded, [prompt], quiet).certificate.relative_error < 1e-5


def test_a_drawn_picture_goes_through_the_processor_where_more_than_pixels_is_taken(tmp_path: Path) -> None:
    build("siglip2_vision_model").save_pretrained(tmp_path)
    shell = skeleton(inspect_folder(tmp_path))
    with pytest.raises(InputError, match=r"as `pixel_values`, and no preprocessor_config\.json .* give --inputs"):
        prepared_inputs(shell, tmp_path, InputFiles(), trust_remote_code=False)
    t.Siglip2ImageProcessor(patch_size=SMALL["patch_size"], max_num_patches=12).save_pretrained(tmp_path)
    [made] = prepared_inputs(shell, tmp_path, InputFiles(), trust_remote_code=False)
    assert set(made.tensors) == {"pixel_values", "pixel_attention_mask", "spatial_shapes"}
    loaded = replace(whole(tmp_path), like=made.tensors)
    assert verify(loaded, as_prompts(loaded, [made]), quiet).certificate.relative_error < 1e-5


def test_a_part_that_cannot_be_read_names_the_others(tmp_path: Path) -> None:
    """X-CLIP's vision part reads the frames of a film."""
    loaded = part_of(as_loaded(tiny.tiny_model("xclip")), "vision")
    [made] = prepared_inputs(loaded.model, tmp_path, InputFiles(), trust_remote_code=False)
    said = (
        r"drawn picture: XCLIPVisionModel cannot read it \(XCLIPModel is read by --stack text as well\): RuntimeError"
    )
    with pytest.raises(InputError, match=said):
        as_prompts(loaded, [made])


def test_a_model_of_videos_reads_a_drawn_one_with_and_without_its_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = t.VideoMAEConfig(image_size=8, patch_size=4, num_frames=4, tubelet_size=2, **sizes)
    t.VideoMAEModel(config).eval().save_pretrained(tmp_path)
    loaded = whole(tmp_path)
    for shell in (skeleton(inspect_folder(tmp_path)), loaded.model):
        [made] = prepared_inputs(shell, tmp_path, InputFiles(), trust_remote_code=False)
        assert made.where == "drawn video"
        assert made.tensors["pixel_values"].shape == (1, 4, 3, 8, 8)
        assert made.positions == 8  # two pairs of frames, four patches each
        first, second = prepared_inputs(shell, tmp_path, InputFiles(pair=True), trust_remote_code=False)
        assert (first.where, second.where) == ("drawn video", "noise of its shape")
        assert torch.equal(first.tensors["pixel_values"], made.tensors["pixel_values"])
        assert second.tensors["pixel_values"].shape == (1, 4, 3, 8, 8)
    held = replace(loaded, like=made.tensors)
    assert verify(held, as_prompts(held, [made]), quiet).certificate.relative_error < 1e-5
    assert support_of(loaded).status == "exact"


def test_support_cannot_tell_of_a_model_for_which_no_input_is_made(tmp_path: Path) -> None:
    tiny.tiny_model("whisper").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"could not tell: .* has no preprocessor_config.json .* takes --inputs"):
        support_of(whole(tmp_path))
    with pytest.raises(InputError, match=r"could not tell: drawn picture: XCLIPVisionModel cannot read it"):
        support_of(part_of(as_loaded(tiny.tiny_model("xclip")), "vision"))


def test_a_chain_read_block_by_block_has_the_same_numbers(tmp_path: Path) -> None:
    tiny.tiny_model("blt").save_pretrained(tmp_path)
    prompts, options = [prompt_of(torch.arange(41, 47)[None])], InspectOptions(cache=False, terms=True)

    def report(loaded: LoadedModel) -> dict[str, Any]:
        return inspect(with_chain(loaded, "global_transformer"), prompts, options, quiet).model_dump(exclude={"run"})

    expected = report(whole(tmp_path))
    assert expected["model"]["stack"] == "global_transformer.layers"
    with in_parts(tmp_path) as loaded:
        assert differing(report(loaded), expected) == []


def test_each_chain_in_turn_and_terms_by_the_block_that_makes_them() -> None:
    loaded = as_loaded(tiny.tiny_model("hrm_text"))
    prompts = [prompt_of(torch.tensor([[41, 50, 47, 60]]))]
    low, high = all_chains(loaded)
    assert (low.chain, high.chain) == ("L_module.layers", "H_module.layers")
    terms = inspect(high, prompts, InspectOptions(cache=False, terms=True), quiet).terms
    assert [term.name for term in terms or ()] == ["x_0", "bias", "block 3", "block 4", "block 5"]
    assert sum(term.share for term in terms or ()) == pytest.approx(1)
    with pytest.raises(InputError, match=r"no one stack of that name; it has L_module\.layers, H_module\.layers"):
        with_chain(loaded, "layers")
    with pytest.raises(
        InputError, match=r"--stack layer: DoryForCausalLM has no one stack of that name; it has layers$"
    ):
        with_chain(as_loaded(tiny.tiny_model("dory")), "layer")
    notes = all_chains(as_loaded(tiny.tiny_model("funnel")))[0].warnings
    assert any(note.startswith("--stack all: encoder.blocks.1 is not read: ") for note in notes)
    with pytest.raises(InputError, match=r"--stack all: GroupViTModel has no two stacks to read; give --stack text$"):
        all_chains(as_loaded(tiny.tiny_model("groupvit")))
