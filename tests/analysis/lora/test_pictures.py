"""`lora-diff` of models of pictures, videos and sound, against plain passes of both models in float64: PEFT's own
merge, KL of classes, what FFNs add as hooks see it, dense operators."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import adapters
import helpers
import numpy as np
import peft
import pytest
import torch
import transformers as t
from image_models import CASES, SMALL, TEXT, build, written
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from duat_cli.analysis.lora import prompts
from duat_cli.api.files import lora_diff
from duat_cli.errors import InputError
from duat_cli.results.lora import LoraReport

# LoRA's targets, saved modules; blocks, what the FFN of a block adds, the module that attention's contribution leaves
CHANGED: dict[str, tuple[str | list[str], list[str] | None, str, str]] = {
    "vit": (["q_proj", "v_proj", "fc1", "fc2"], ["classifier"], "vit.layers", "mlp"),
    "clip_vision_model": (["q_proj", "v_proj", "fc1"], None, "encoder.layers", "mlp"),
    "siglip_vision_model": (["k_proj", "fc2"], None, "encoder.layers", "mlp"),
    "dinov2": ("all-linear", None, "encoder.layer", "layer_scale2"),
    "videomae": (["query", "dense"], None, "encoder.layer", "output.dense"),
    "whisper": (["q_proj", "v_proj", "fc1", "fc2"], None, "model.encoder.layers", "fc2"),
    "wav2vec2": (["q_proj", "intermediate_dense"], None, "wav2vec2.encoder.layers", "feed_forward"),
    "swin": (["q_proj", "v_proj", "fc1"], ["classifier"], "", ""),
}


def inputs(name: str, folder: Path, count: int = 2) -> list[str]:
    """Files of --inputs."""
    generator = torch.Generator().manual_seed(5)
    each = [CASES[name][1]() for _ in range(count)]
    made = ({key: torch.randn(value.shape, generator=generator) for key, value in one.items()} for one in each)
    return written(made, folder)


def made(name: str, folder: Path, **config: Any) -> tuple[Path, Path]:
    build(name).save_pretrained(folder / "base")
    targets, saved, *_ = CHANGED[name]
    fields = {"r": 3, "lora_alpha": 12, "target_modules": targets, "modules_to_save": saved} | config
    return folder / "base", adapters.make(folder / "base", folder / "adapter", peft.LoraConfig(**fields))


Reported = Callable[[str], tuple[Path, Path, list[str], LoraReport]]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """A model's base, an adapter on it, files of inputs and the report in float64: made once, and only read."""

    @functools.cache
    def of(name: str) -> tuple[Path, Path, list[str], LoraReport]:
        folder = tmp_path_factory.mktemp(name)
        base, adapter = made(name, folder)
        files = inputs(name, folder)
        return base, adapter, files, lora_diff(base, adapter, inputs=files, dtype="float64")

    return of


def merged(base: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(adapters.load_base(base).double(), adapter).merge_and_unload().double().eval()


def blocks_of(name: str, model: Any) -> list[tuple[nn.Module, nn.Module | None]]:
    """Every block, and the module whose output its FFN adds."""
    if name != "swin":
        *_, blocks, added = CHANGED[name]
        return [(block, block.get_submodule(added)) for block in model.get_submodule(blocks)]
    stages = model.swin.encoder.layers
    found = [[*stage.blocks, *([] if stage.downsample is None else [stage.downsample])] for stage in stages]
    return [(block, getattr(block, "mlp", None)) for stage in found for block in stage]


def seen(name: str, model: Any, file: str) -> tuple[list[Tensor], list[Tensor | None], Tensor | None]:
    """What a plain pass in float64 gives behind every block, what the FFNs add, and the logits of classes."""
    handles, outputs, added = [], dict[nn.Module, Tensor](), dict[nn.Module, Tensor]()
    pairs = blocks_of(name, model)
    for into, modules in ((outputs, [block for block, _ in pairs]), (added, [ffn for _, ffn in pairs if ffn])):
        for module in modules:
            handles.append(
                module.register_forward_hook(
                    lambda module, _args, out, into=into: into.update({module: out if torch.is_tensor(out) else out[0]})
                )
            )
    given = {key: value.double() for key, value in load_file(file).items()}
    with torch.no_grad():
        out = (model.get_encoder() if name == "whisper" else model)(**given)
    for handle in handles:
        handle.remove()
    logits = out.logits[0] if name in ("vit", "swin") else None
    return [outputs[b] for b, _ in pairs], [None if ffn is None else added[ffn] for _, ffn in pairs], logits


def relative(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("name", CHANGED)
def test_every_number_is_what_plain_passes_say(name: str, reported: Reported) -> None:
    base, adapter, files, report = reported(name)
    models = adapters.load_base(base).double(), merged(base, adapter)
    each = [[seen(name, model, file) for model in models] for file in files]
    assert report.certificate.exact
    assert report.tuned_certificate.exact
    assert report.eq18.holds
    for k, block in enumerate(report.blocks):
        want = mean([relative(before[0][k], after[0][k]) for before, after in each])
        assert want > 0.001
        assert block.terms.output == pytest.approx(want, rel=1e-9)
        pairs = [(before[1][k], after[1][k]) for before, after in each]
        if pairs[0][0] is None:  # it merges patches
            assert block.terms.ffn is None
            assert "makes other tokens of the stream" in block.operator.reasons["relative_change"]
        else:
            want = mean([relative(one, two) for one, two in pairs if one is not None and two is not None])
            assert block.terms.ffn == pytest.approx(want, rel=1e-9)
    for row in report.by_prompt:
        (p, q), moved = (one[2] for one in each[row.prompt]), [one[0][-1] for one in each[row.prompt]]
        assert row.output == pytest.approx(relative(*moved), rel=1e-9)
        assert row.moved_tokens == []
        assert row.loss_base is row.loss_tuned is None
        if p is None or q is None:
            said = "its encoder" if name == "whisper" else "it is no classifier of a picture or a sound"
            assert row.reasons["kl"].endswith(said)
            assert row.kl is None
        else:
            p, q = p.log_softmax(-1), q.log_softmax(-1)
            assert row.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-9)


def test_the_change_of_an_operator_is_that_of_the_dense_ones(reported: Reported) -> None:
    base, adapter, files, report = reported("vit")

    class Seeing:
        """Runs the model on the picture, as one that is given token ids."""

        def __init__(self, model: Any, file: str) -> None:
            self.get_submodule, self._model = model.get_submodule, model
            self._given = {key: value.double() for key, value in load_file(file).items()}

        def __call__(self, input_ids: Tensor) -> Any:
            return self._model(**self._given)

    wiring = helpers.Wiring("vit.layers", "attention.o_proj")
    models = adapters.load_base(base).double(), merged(base, adapter)
    each = [[helpers.dense_blocks(Seeing(m, file), torch.zeros(1), wiring) for m in models] for file in files]
    for k, block in enumerate(report.blocks):
        want = mean([relative(before[k].W, after[k].W) for before, after in each])
        assert block.operator.relative_change == pytest.approx(want, rel=1e-6)


def test_the_merged_checkpoint_says_the_same(reported: Reported, tmp_path: Path) -> None:
    """Where transformers writes tensors under other names than the modules have, Eq. 18 finds them all the same."""
    base, adapter, files, one = reported("vit")
    merged(base, adapter).float().save_pretrained(tmp_path / "tuned")
    two = lora_diff(base, tmp_path / "tuned", inputs=files)
    assert "vit.encoder.layer.0.intermediate.dense.weight" in load_file(base / "model.safetensors")
    assert two.eq18.holds
    assert len(two.eq18.on_second) == len(two.eq18.on_third) == 2
    assert two.summary.kl == pytest.approx(one.summary.kl, rel=1e-4)
    for mine, theirs in zip(one.blocks, two.blocks, strict=True):
        assert mine.operator.relative_change == pytest.approx(theirs.operator.relative_change, rel=1e-4)


def numbers(report: Any) -> dict[str, Any]:
    return report.model_dump(exclude={"run"})


def require_same_in_parts(whole: LoraReport, folder: Path, *arguments: Any, **given: Any) -> None:
    """Weights that are read block by block give the same report."""
    disk = folder / "disk.json"
    disk.write_text('{"": "disk"}')
    assert whole.blocks
    assert numbers(lora_diff(*arguments, **given, device_map=str(disk))) == numbers(whole)


@pytest.mark.parametrize("name", ["vit", "wav2vec2", "swin"])
def test_weights_read_block_by_block_give_the_same(name: str, reported: Reported, tmp_path: Path) -> None:
    """Of wav2vec2 with a page in front of the blocks."""
    base, adapter, files, whole = reported(name)
    require_same_in_parts(whole, tmp_path, base, adapter, inputs=files, dtype="float64")


# -- heads of an adapter's own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["ViTModel", "ViTForImageClassification"])
def test_a_head_of_other_classes_leaves_all_but_kl(base: str, tmp_path: Path) -> None:
    """As PEFT's guide to image classification trains one: a new head on a base that has none, or other classes."""
    whole = build("vit")
    (whole.vit if base == "ViTModel" else whole).save_pretrained(tmp_path / "base")
    model = t.ViTForImageClassification.from_pretrained(
        tmp_path / "base", num_labels=3, ignore_mismatched_sizes=True, dtype=torch.float32
    )
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["classifier"], init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "tuned")
    files = inputs("vit", tmp_path)
    one, two = (lora_diff(tmp_path / "base", tmp_path / name, inputs=files) for name in ("adapter", "tuned"))
    assert one.added == ["classifier.bias", "classifier.weight"]
    said = (
        "the models predict 2 and 3 classes"
        if base.endswith("Classification")
        else "it is no classifier of a picture or a sound"
    )
    for report in (one, two):
        assert all(row.kl is None and row.reasons["kl"].endswith(said) for row in report.by_prompt)
    for mine, theirs in zip(one.blocks, two.blocks, strict=True):
        for what in ("operator.relative_change", "operator.routing", "terms.output", "terms.ffn"):
            part, field = what.split(".")
            ours, other = (getattr(getattr(block, part), field) for block in (mine, theirs))
            assert ours == pytest.approx(other, rel=1e-4), what
    weights = lora_diff(tmp_path / "base", tmp_path / "adapter")
    assert (weights.added, len(weights.modules)) == (one.added, 2)
    findings = [finding for finding in weights.lint if finding.rule != "magnitude"]  # of LoRA that is drawn
    said = "'classifier.bias', 'classifier.weight': of another number of classes than the base's"
    assert [f.message.startswith(said) for f in findings] == ([True] if base.endswith("Classification") else [])
    assert all((finding.rule, finding.level) == ("shape-mismatch", "warning") for finding in findings)
    require_same_in_parts(one, tmp_path, tmp_path / "base", tmp_path / "adapter", inputs=files)


def test_a_head_of_classes_on_a_model_of_texts_is_not_compared_with_its_next_token(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    model = t.LlamaForSequenceClassification.from_pretrained(base, num_labels=3, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["score"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    report = lora_diff(base, tmp_path / "adapter", prompts=[[5, 6, 7]])
    [row] = report.by_prompt
    assert row.output > 0
    assert row.kl is row.loss_base is None
    assert row.reasons["kl"] == "the adapter has a head of its own, score.weight, which the base lacks"


# -- parts, processors, refusals ---------------------------------------------------------------------------------


def test_a_part_of_a_model_of_two_is_compared_as_that_part_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    text = TEXT | {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2}
    t.CLIPModel(t.CLIPConfig(vision_config=SMALL, text_config=text)).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "fc2"])
    adapter = adapters.make(tmp_path / "base", tmp_path / "adapter", config)
    wholes = t.CLIPModel.from_pretrained(tmp_path / "base"), merged(tmp_path / "base", adapter).float()
    wholes[1].save_pretrained(tmp_path / "tuned")
    for whole, folder in zip(wholes, ("one", "two"), strict=True):
        whole.vision_model.save_pretrained(tmp_path / folder)
    files = inputs("clip_vision_model", tmp_path)
    alone = lora_diff(tmp_path / "one", tmp_path / "two", inputs=files)
    for name in ("adapter", "tuned"):
        part = lora_diff(tmp_path / "base", tmp_path / name, inputs=files, stack="vision")
        assert any(note.startswith("--stack vision: the CLIPVision") for note in part.warnings)
        assert len(part.modules) == 8  # of texts as well
        assert len(part.eq18.on_third) == 2
        for mine, theirs in zip(part.blocks, alone.blocks, strict=True):
            assert mine.operator.relative_change == pytest.approx(theirs.operator.relative_change, rel=1e-4)
            assert mine.terms.ffn == pytest.approx(theirs.terms.ffn, rel=1e-4)
        if name == "adapter":
            require_same_in_parts(part, tmp_path, tmp_path / "base", adapter, inputs=files, stack="vision")
    read = lora_diff(tmp_path / "base", adapter, prompts=[[5, 6]], stack="text")
    assert read.model.architecture == "CLIPTextModel"


def test_the_bases_processor_makes_what_both_read(tmp_path: Path) -> None:
    """The tuned model's where the base has none; where the two differ, that is said."""
    base, adapter = made("vit", tmp_path)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=np.uint8))
    one, two = (t.ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[m] * 3) for m in (0.5, 0.4))
    two.save_pretrained(adapter)
    theirs = lora_diff(base, adapter, image=picture)
    one.save_pretrained(base)
    own = lora_diff(base, adapter, image=picture)
    each = [{"pixel_values": made(images=picture, return_tensors="pt")["pixel_values"]} for made in (two, one)]
    by_tensors = lora_diff(base, adapter, inputs=written(each, tmp_path)).by_prompt
    for row in by_tensors:
        assert (theirs, own)[row.prompt].summary.kl == pytest.approx(row.kl, rel=1e-6)
    assert len(by_tensors) == 2
    said = "preprocessor_config.json.image_mean [0.5, 0.5, 0.5] and [0.4, 0.4, 0.4]; both models read what the base's"
    assert any(said in note for note in own.warnings)
    assert not any("what makes inputs differs" in note for note in theirs.warnings)
    drawn = lora_diff(base, adapter, default_prompts=True)
    assert "no file was given: read was a drawn picture" in drawn.warnings


def test_what_it_does_not_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = made("vit", tmp_path)
    files = inputs("vit", tmp_path)
    larger = shutil.copytree(base, tmp_path / "larger")
    config = t.ViTConfig(**SMALL | {"image_size": 32})
    state = t.ViTForImageClassification(config).state_dict()
    own = adapters.load_base(base).state_dict()
    model = t.ViTForImageClassification(config)
    model.load_state_dict({k: v if own[k].shape != v.shape else own[k] for k, v in state.items()})
    model.save_pretrained(larger)
    with pytest.raises(InputError, match=r"0\.safetensors: the tuned checkpoint cannot read it in these sizes"):
        lora_diff(base, larger, inputs=files)
    with pytest.raises(InputError, match="--stack decoder: ViTForImageClassification is no encoder with a decoder"):
        lora_diff(base, adapter, inputs=files, stack="decoder")
    with pytest.raises(InputError, match="--stack: there are no prompts; give --prompt, --prompts, --image"):
        lora_diff(base, adapter, stack="vision")
    with pytest.raises(InputError, match="--default-prompts: give either it or prompts of your own"):
        lora_diff(base, adapter, inputs=files, default_prompts=True)
    monkeypatch.setattr(prompts, "KEPT_BYTES", 300)
    with pytest.raises(InputError, match=r"a prompt of 17 tokens: .* more than 0; \d+ fit$"):
        lora_diff(base, adapter, inputs=files)
