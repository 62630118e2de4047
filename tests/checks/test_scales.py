"""What scales are found to be, on a checkpoint of each format."""

from __future__ import annotations

from pathlib import Path

import bad_checkpoints as bad
import pytest
from quantising import WAYS, gpt_oss, mxfp4, quantise
from running_checks import Duat
from safetensors.torch import load_file, save_file

from duat_cli.checks.scales import scale_facts
from duat_cli.loading.checkpoint.preflight import inspect_folder

V = "model.layers.1.self_attn.v_proj."


def made(folder: Path, way: str) -> Path:
    bad.llama(folder / "q", dtype="bfloat16", hidden_size=64, intermediate_size=96)
    return quantise(folder / "q", way, folder / "plain")


def with_scale(folder: Path, leaf: str, value: float) -> Path:
    """One scale of a value matrix set."""
    held = load_file(folder / bad.W)
    held[V + leaf].view(-1)[3] = value
    save_file(held, folder / bad.W, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_sound_scales(way: str, tmp_path: Path) -> None:
    files = inspect_folder(made(tmp_path, way))
    found = scale_facts(files)
    assert set(found) == {name for name, entry in files.tensors.items() if ".layers." in name and len(entry.shape) > 1}
    for facts in found.values():
        assert (facts.nonfinite, facts.zero, facts.beyond) == (0, 0, 0)
        assert facts.count > 0


def test_powers_of_two(tmp_path: Path) -> None:
    files = inspect_folder(mxfp4(gpt_oss(tmp_path / "q"), tmp_path / "plain"))
    assert {(f.count, f.nonfinite, f.zero, f.beyond) for f in scale_facts(files).values()} == {
        (3 * 64 * 2, 0, 0, 0),
        (3 * 64 * 1, 0, 0, 0),
    }


@pytest.mark.parametrize(
    ("way", "leaf", "value", "words"),
    [
        ("fp8", "weight_scale_inv", 0.0, "1 of 8 scales in '{name}': zero"),
        ("fp8", "weight_scale_inv", float("nan"), "1 of 8 scales in '{name}': NaN or infinite"),
        ("fp8", "weight_scale_inv", float("inf"), "1 of 8 scales in '{name}': NaN or infinite"),
        ("fp8", "weight_scale_inv", 1e36, "1 of 8 scales in '{name}': so large that '{weight}' is beyond bfloat16"),
        ("int8", "weight_scale", 0.0, "1 of 32 scales in '{name}': zero"),
        ("int4", "weight_scale", float("nan"), "1 of 128 scales in '{name}': NaN or infinite"),
        ("gptq", "scales", 0.0, "1 of 128 scales in '{name}': zero"),
        ("awq", "scales", float("inf"), "1 of 128 scales in '{name}': NaN or infinite"),
        ("llm_int8", "SCB", float("nan"), "1 of 32 scales in '{name}': NaN or infinite"),
    ],
)
def test_the_rule_finds_a_broken_scale(
    way: str, leaf: str, value: float, words: str, tmp_path: Path, duat: Duat
) -> None:
    folder = with_scale(made(tmp_path, way), leaf, value)
    report = duat("check", folder, "--weights-only", "--json").json
    [found] = [o for o in report["outcomes"] if o["rule"] == "integrity.scales" and o["status"] == "failed"]
    assert found["message"].startswith(words.format(name=V + leaf, weight=f"{V}weight"))
    assert (found["where"], found["block"]) == (V + leaf, 1)
    assert report["causes"][0]["rules"][0] == "integrity.scales"


def test_a_scale_beyond_float16(tmp_path: Path) -> None:
    """The largest weight of int8 is 128 scales."""
    folder = with_scale(made(tmp_path, "int8"), "weight_scale", 600.0)
    assert scale_facts(inspect_folder(folder))[f"{V}weight"].beyond == 0
    bad.jedit(folder / bad.CFG, dtype="float16")
    facts = scale_facts(inspect_folder(folder))[f"{V}weight"]
    assert (facts.beyond, facts.dtype) == (1, "float16")


def test_a_block_of_zeros_has_the_scale_zero_in_bitsandbytes(tmp_path: Path) -> None:
    folder = with_scale(made(tmp_path, "nf4"), "weight.absmax", 0)
    assert scale_facts(inspect_folder(folder))[f"{V}weight"].zero == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_sound_quantised_checkpoint_passes(way: str, tmp_path: Path, duat: Duat) -> None:
    """Of the weights; what the model answers at random is another matter."""
    report = duat("check", made(tmp_path, way), "--weights-only", "--json").json
    assert report["verdict"] == "passed", report["causes"]
    assert report["model"]["quantised"].startswith(WAYS[way][1]["quant_method"])
