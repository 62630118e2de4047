"""Weights in one pass: every number against torch on the loaded tensors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import bad_checkpoints as bad
import numpy as np
import pytest
import torch
from quantising import WAYS, gpt_oss, mxfp4, quantise
from running_checks import Duat
from safetensors.torch import load_file, save_file

from duat_cli.checks.sketch import SIZE
from duat_cli.checks.weights import TensorFacts, distance, scale_facts, weight_facts
from duat_cli.loading.checkpoint import stream
from duat_cli.loading.checkpoint.preflight import inspect_folder


def facts(folder: Path, **tensors: torch.Tensor) -> dict[str, TensorFacts]:
    folder.mkdir(exist_ok=True)
    (folder / bad.CFG).write_text(json.dumps({"model_type": "llama"}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / bad.W)
    return weight_facts(inspect_folder(folder), lambda *_: None).tensors


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.uint8],
)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (700, 300), (1, 1), ()])
def test_norms_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 40).to(dtype)
    found = facts(tmp_path / "m", x=tensor)["x"]
    assert found.norm == pytest.approx(float(tensor.double().norm()), rel=2e-5)
    assert found.rows * found.columns == tensor.numel()
    assert found.nonfinite == 0


def test_a_bound_of_a_clamp_may_be_infinite(tmp_path: Path) -> None:
    inf = torch.full((2,), float("inf"))
    found = facts(
        tmp_path / "m", **{"a.input_max": inf[0] + 0, "a.input_min": -inf[0], "a.output_max": torch.tensor(3.0)}
    )
    assert [(t.nonfinite, t.norm) for t in found.values()] == [(0, 0.0), (0, 0.0), (0, 3.0)]
    wrong = {"a.x_max": -inf[0], "a.x_min": inf[0] + 0, "b.x_max": inf[0] * 0, "c.x_max": inf, "w": inf[0] + 1}
    assert [t.nonfinite for t in facts(tmp_path / "m", **wrong).values()] == [1, 1, 1, 2, 1]


def test_complex_numbers_count_twice(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    found = facts(tmp_path / "m", x=tensor)["x"]
    assert found.norm == pytest.approx(float(tensor.abs().norm()), rel=1e-6)
    assert (found.rows, found.columns) == (3, 8)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-12, 1e12, 1e25, 1e38])
def test_squares_beyond_float32(scale: float, tmp_path: Path) -> None:
    tensor = (torch.rand(40, 50) + 0.1) * scale
    found = facts(tmp_path / "m", x=tensor)["x"]
    assert found.norm == pytest.approx(float(tensor.double().norm()), rel=1e-6)
    assert (found.nonfinite, len(found.zero_rows)) == (0, 0)


def test_a_sketch_estimates_a_distance(tmp_path: Path) -> None:
    """Unbiased in the square, over many changes of many kinds; and exact where nothing changed."""
    torch.manual_seed(1)
    ratios = []
    for number in range(60):
        one = torch.randn(97, 61)
        kinds = (
            torch.randn(97, 61) * 0.01,
            torch.randn(97, 1) @ torch.randn(1, 61) * 0.1,
            torch.eye(97, 61)[torch.randperm(97)],
        )
        change = kinds[number % 3]
        found = facts(tmp_path / "m", a=one, b=one + change, c=one.clone())
        a, b, c = found["a"], found["b"], found["c"]
        ratios.append(distance(b.numbers, a.numbers) / float(change.norm() / one.norm()))
        assert distance(c.numbers, a.numbers) < 1e-6
    assert 0.9 < np.sqrt(np.mean(np.square(ratios))) < 1.1
    assert min(ratios) > 0.3
    assert len(a.sketch) == SIZE


def test_a_vector_s_sketch_tells_as_much(tmp_path: Path) -> None:
    one = torch.ones(4096)
    two = one.clone()
    two[::2] += 0.02
    found = facts(tmp_path / "m", a=one, b=two, c=one * 2)
    true = float((two - one).norm() / one.norm())
    assert distance(found["b"].numbers, found["a"].numbers) == pytest.approx(true, rel=0.7)
    assert distance(found["c"].numbers, found["a"].numbers) >= 1.0 - 1e-6


def test_a_distance_is_one_that_can_be(tmp_path: Path) -> None:
    """Of a tensor of which zeros are left it is 1; whatever the sketch says."""
    found = facts(tmp_path / "m", **{f"t{k}": torch.randn(16, 4 + k) for k in range(40)}, zero=torch.zeros(16, 4))
    gone = found.pop("zero")
    assert {distance(gone.numbers, one.numbers) for one in found.values()} == {1.0}


def test_rows_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LONGEST_ROW", 100)
    monkeypatch.setattr(stream, "PIECE", 64)
    tensors = {"long": torch.randn(5, 1037), "many": torch.randn(1000, 3), "vector": torch.randn(999)}
    tensors["long"][2, 1000] = float("nan")
    found = facts(tmp_path / "m", **tensors)
    assert found["many"].norm == pytest.approx(float(tensors["many"].norm()), rel=1e-6)
    assert found["vector"].norm == pytest.approx(float(tensors["vector"].norm()), rel=1e-6)
    assert found["long"].nonfinite == 1


def test_each_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad.llama(tmp_path / "m", shards=True, tok=False)
    files = inspect_folder(tmp_path / "m")
    read: list[tuple[str, int, int]] = []
    once = stream.read_into

    def counting(path: Path, file: object, offset: int, buffer: np.ndarray, name: str) -> None:
        read.append((path.name, offset, buffer.nbytes))
        once(path, file, offset, buffer, name)

    monkeypatch.setattr(stream, "read_into", counting)
    weight_facts(files, lambda *_: None)
    assert sum(size for *_, size in read) == files.total_bytes
    assert read == sorted(read)  # and in the order of the files
    for (shard, start, size), (other, following, _) in itertools.pairwise(read):
        assert shard != other or start + size == following


def test_what_is_zero_and_what_is_not_finite(tmp_path: Path) -> None:
    x = torch.randn(600, 500)
    x[[3, 599]] = 0
    x[:, [0, 7, 499]] = 0
    x[:, 8] = 0
    x[400, 8] = 1e-30
    y = torch.randn(50, 40)
    y[3, 5], y[49, 39], y[7, 7] = float("nan"), float("inf"), float("-inf")
    found = facts(tmp_path / "m", x=x, y=y, z=torch.zeros(300, 700), signs=torch.tensor([[1.0, -1.0], [1.0, 1.0]]))
    assert found["x"].zero_rows.tolist() == [3, 599]
    assert found["x"].zero_columns.tolist() == [0, 7, 499]
    assert found["y"].nonfinite == 3
    assert np.isnan(found["y"].norm)
    assert (len(found["z"].zero_rows), len(found["z"].zero_columns), found["z"].norm) == (300, 700, 0.0)
    assert len(found["signs"].zero_rows) == 0


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


@pytest.mark.parametrize(("way", "leaf"), [("nf4", "weight.absmax"), ("llm_int8", "SCB")])
def test_zeros_have_the_scale_zero_in_bitsandbytes(way: str, leaf: str, tmp_path: Path) -> None:
    folder = with_scale(made(tmp_path, way), leaf, 0)
    assert scale_facts(inspect_folder(folder))[f"{V}weight"].zero == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_sound_quantised_checkpoint_passes(way: str, tmp_path: Path, duat: Duat) -> None:
    """Of the weights; what the model answers at random is another matter."""
    report = duat("check", made(tmp_path, way), "--weights-only", "--json").json
    assert report["verdict"] == "passed", report["causes"]
    assert report["model"]["quantised"].startswith(WAYS[way][1]["quant_method"])
