"""Quantised checkpoints as models: whole, block by block and as a stream, against the numbers that they hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import numpy as np
import pytest
import torch
from paging import ids_of, in_parts, outputs, whole
from quantising import WAYS, gpt_oss, mxfp4, quantise
from refusals import refusal_of_files
from safetensors.torch import load_file, save_file

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.dtypes import auto_dtype, most_stored_name
from duat_cli.loading.checkpoint.preflight import CheckpointFiles, inspect_folder
from duat_cli.loading.checkpoint.stream import stream
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.memory import weight_bytes

EVERY = [*WAYS, "mxfp4"]


def made(way: str, folder: Path) -> tuple[Path, Path]:
    """(quantised, the same numbers in full precision)"""
    if way == "mxfp4":
        return mxfp4(gpt_oss(folder / "q"), folder / "plain"), folder / "plain"
    bad.llama(folder / "q", dtype="bfloat16", intermediate_size=96, hidden_size=64)
    return quantise(folder / "q", way, folder / "plain"), folder / "plain"


@pytest.fixture(params=EVERY, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made(request.param, tmp_path_factory.mktemp("pair"))


def test_a_model_has_the_numbers_of_its_format(pair: tuple[Path, Path]) -> None:
    """Whole and block by block; in float32 the last bit may differ from a product in float64."""
    quantised, plain = pair
    one, two = whole(quantised), whole(plain)
    for (name, here), (other, there) in zip(one.model.named_parameters(), two.model.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(here, there, rtol=2.4e-7, atol=0)
    assert not one.warnings
    assert not hasattr(one.model.config, "quantization_config")
    assert one.files.quantised is not None
    ids = ids_of(one, 7)
    with in_parts(quantised) as parts:
        assert torch.equal(outputs(parts.model, ids), outputs(one.model, ids))
        assert parts.paged is not None
        assert parts.paged.fingerprint(parts.model) == fingerprint(one.model)


def test_the_stream_has_the_same_numbers(pair: tuple[Path, Path]) -> None:
    """Without torch; pieces are of whole rows, in order."""
    quantised, _ = pair
    files, model = inspect_folder(quantised), dict(whole(quantised).model.named_parameters())
    for tensor in stream(files):
        rows = [(piece.row, piece.values.copy()) for piece in tensor.pieces]
        assert [row for row, _ in rows] == list(np.cumsum([0, *(len(values) for _, values in rows[:-1])]))
        values = torch.from_numpy(np.concatenate([values for _, values in rows])).reshape(tensor.entry.shape)
        assert torch.equal(model[tensor.name], values.float())


def test_sizes(pair: tuple[Path, Path]) -> None:
    """Bytes of the files for what is read, of the numbers for what is held."""
    quantised, plain = pair
    files, full = inspect_folder(quantised), inspect_folder(plain)
    assert {n: t.shape for n, t in files.tensors.items()} == {n: t.shape for n, t in full.tensors.items()}
    held = sum(t.numel() * t.element_size() for t in load_file(quantised / bad.W).values())
    assert files.total_bytes == held < full.total_bytes
    spared = sum(files.stored[name].bytes for name in files.stored if name.endswith(("_shape", "_format")))
    states = sum(files.stored[name].bytes for name in files.stored if ".quant_state." in name)
    assert sum(t.bytes for t in files.tensors.values()) == held - spared - states
    size = {"bfloat16": 2, "float32": 4}[auto_dtype(files)]
    assert weight_bytes(files, "auto") == size * sum(t.elements for t in full.tensors.values())
    assert weight_bytes(files, "float32") == weight_bytes(full, "float32")
    with in_parts(quantised) as parts:
        assert parts.paged is not None
        parts.paged.fingerprint(parts.model)
        assert parts.paged.pager.bytes_read == held - spared - states


def test_the_dtype_is_the_one_before_quantisation(tmp_path: Path) -> None:
    quantised, _ = made("fp8", tmp_path)
    assert most_stored_name(inspect_folder(quantised)) == "bfloat16"


def every_piece(files: CheckpointFiles) -> None:
    for tensor in stream(files):
        list(tensor.pieces)


def test_groups_without_scales_are_named(tmp_path: Path) -> None:
    """The order of groups is a value, which no header tells."""
    quantised, _ = made("gptq", tmp_path)
    order = load_file(quantised / bad.W)[f"{Q}g_idx"]
    files = inspect_folder(damaged(quantised, g_idx=order + 1))
    with pytest.raises(CheckpointError, match="g_idx': groups 1 to 4 of 4 that have scales"):
        every_piece(files)


# -- refusals -----------------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj."


def damaged(folder: Path, **tensors: Any) -> Path:
    """None removes a tensor of the first query matrix; anything else stands in its place."""
    held = load_file(folder / bad.W)
    for leaf, tensor in tensors.items():
        held.pop(Q + leaf, None)
        if tensor is not None:
            held[Q + leaf] = tensor
    save_file(held, folder / bad.W, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("way", "leaf"),
    [
        ("fp8", "weight_scale_inv"), ("int8", "weight_scale"), ("int4", "weight_scale"), ("int4", "weight_shape"),
        ("int4", "weight_zero_point"), ("gptq", "scales"), ("gptq", "qzeros"), ("awq", "scales"), ("awq", "qzeros"),
        ("nf4", "weight.absmax"), ("nf4", "weight.quant_map"), ("nf4", "weight.nested_absmax"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4"), ("llm_int8", "SCB"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(way: str, leaf: str, tmp_path: Path) -> None:
    quantised, _ = made(way, tmp_path)
    message = refusal_of_files(damaged(quantised, **{leaf: None}))
    assert bad.W in message
    assert f"'{Q}{leaf}'" in message
    assert "missing" in message


@pytest.mark.parametrize(
    ("way", "leaf", "shape"),
    [
        ("fp8", "weight_scale_inv", (3, 7)), ("fp8", "weight_scale_inv", (4, 4, 1)), ("int8", "weight_scale", (63, 1)),
        ("int4", "weight_scale", (64, 3)), ("int4", "weight_zero_point", (7, 4)), ("gptq", "scales", (4, 63)),
        ("gptq", "scales", (2, 64)), ("gptq", "qzeros", (4, 7)), ("gptq", "g_idx", (63,)), ("awq", "scales", (3, 64)),
        ("awq", "qzeros", (4, 7)), ("nf4", "weight.absmax", (63,)), ("nf4", "weight.quant_map", (15,)),
        ("nf4", "weight.nested_absmax", (2,)), ("llm_int8", "SCB", (63,)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(way: str, leaf: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    quantised, _ = made(way, tmp_path)
    old = load_file(quantised / bad.W)[Q + leaf]
    message = refusal_of_files(damaged(quantised, **{leaf: torch.zeros(shape).to(old.dtype)}))
    assert bad.W in message
    assert Q in message
    assert str(list(shape)) in message or "does not hold" in message


@pytest.mark.parametrize(
    ("way", "leaf", "dtype"),
    [
        ("fp8", "weight_scale_inv", torch.int32), ("int8", "weight_scale", torch.complex64),
        ("int4", "weight_scale", torch.int32), ("int4", "weight_zero_point", torch.float32),
        ("int4", "weight_shape", torch.float64), ("gptq", "qzeros", torch.float32), ("gptq", "g_idx", torch.float32),
        ("gptq", "scales", torch.int8), ("awq", "qzeros", torch.float32), ("nf4", "weight.absmax", torch.float32),
        ("nf4", "weight.quant_map", torch.uint8), ("llm_int8", "SCB", torch.bool),
    ],
)  # fmt: skip
def test_what_is_of_another_dtype_is_named(way: str, leaf: str, dtype: torch.dtype, tmp_path: Path) -> None:
    quantised, _ = made(way, tmp_path)
    old = load_file(quantised / bad.W)[Q + leaf]
    message = refusal_of_files(damaged(quantised, **{leaf: old.to(dtype)}))
    assert f"'{Q}{leaf}': dtype " in message
    assert "expected " in message


def test_experts_without_scales(tmp_path: Path) -> None:
    quantised, _ = made("mxfp4", tmp_path)
    held = load_file(quantised / bad.W)
    name = next(name for name in held if name.endswith("down_proj_scales"))
    save_file({n: t for n, t in held.items() if n != name}, quantised / bad.W)
    assert f"its '{name}' is missing" in refusal_of_files(quantised)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"quant_method": "hqq"}, "quantization_config: quantised weights (quant_method 'hqq'; read are fp8, "),
        ({"quant_method": "hqq"}, "in full precision: as it was before, or by model.dequantize() and save_pretrained"),
        ({"bits": 8}, "quantised weights (without a quant_method; read are fp8, "),
        ({"bits": 4, "group_size": 64, "mode": "affine"}, "as MLX has it, which is not read: mlx_lm.convert --dequant"),
        ({"quant_method": "fp8"}, "but the files hold none"),
        ({"quant_method": "mxfp8"}, "but the files hold none"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "bits '3'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin' of gptq; read are gptq and gptq_v2) are"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "not as 'compressed-tensors' writes it"),
        ({"quant_method": "fp8", "weight_block_size": [math.inf, 32]}, "not as 'fp8' writes it"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"a": {"weights": {}, "targets": ["re:("]}},
            },
            "not as 'compressed-tensors' writes it",
        ),
        ("int8", "quant_method 'int8'"),
    ],
)
def test_a_config_that_is_not_read(config: Any, part: str, sound: Path) -> None:
    bad.jedit(sound / bad.CFG, quantization_config=config)
    message = refusal_of_files(sound)
    assert bad.CFG in message
    assert part in message


def test_a_config_that_is_lost(tmp_path: Path) -> None:
    """What it said stands in another file, as AutoGPTQ wrote it at first."""
    quantised, _ = made("gptq", tmp_path)
    content = json.loads((quantised / bad.CFG).read_text()).pop("quantization_config")
    bad.jedit(quantised / bad.CFG, drop=("quantization_config",))
    message = refusal_of_files(quantised)
    assert ".qweight': quantised as GPTQ and AWQ do it, but config.json has no quantization_config" in message
    assert 'put the content of quantize_config.json there, with "quant_method": "gptq"' in message
    bad.jedit(quantised / bad.CFG, quantization_config=content)
    assert inspect_folder(quantised).quantised == "gptq (4 bits, groups of 16)"


def test_what_mlx_stores(sound: Path) -> None:
    """Where config.json has the field `quantization` alone."""
    weight, scales = f"{Q}weight", {f"{Q}scales": torch.ones(32, 1), f"{Q}biases": torch.ones(32, 1)}
    bad.wedit(sound, lambda s: {**s, weight: torch.zeros(32, 4, dtype=torch.uint32), **scales})
    message = refusal_of_files(sound)
    assert f"'{weight}': words of 32 bits beside their scales, as MLX has it, which is not read: mlx_lm.conv" in message


def test_two_configs_that_differ(tmp_path: Path) -> None:
    quantised, _ = made("fp8", tmp_path)
    bad.jedit(quantised / bad.CFG, text_config={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert "quantization_config and text_config.quantization_config differ" in refusal_of_files(quantised)


def test_a_weight_stored_twice(tmp_path: Path) -> None:
    quantised, plain = made("gptq", tmp_path)
    weight = load_file(plain / bad.W)[f"{Q}weight"]
    assert "stored both quantised and not" in refusal_of_files(damaged(quantised, weight=weight))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    quantised, _ = made("fp8", tmp_path)
    files = inspect_folder(quantised)
    with (quantised / bad.W).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="changed since it was checked"):
        every_piece(files)
