"""Sizes from headers and config.json are those of the loaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import single_model, two_deep
from paging import two_saved, whole

from duat_cli.analysis.plan.shape import shape_of
from duat_cli.analysis.session import Session
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import demo_path


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2", "falcon", "bloom", "distilbert", "xglm"])
def test_width_heads_and_weights(model_type: str, tmp_path: Path) -> None:
    shape = shape_of(inspect_folder(two_saved(model_type, tmp_path)), "float32")
    loaded = whole(tmp_path)
    structure = Session(loaded, lambda *_: None, cache=False).structure
    factors = structure.block(0).factors
    assert factors is not None
    heads = factors.heads
    assert (shape.width, shape.heads) == (structure.hidden_size, heads.heads)
    assert shape.values == heads.value.numel() * heads.value.element_size()
    assert shape.outputs == heads.output.numel() * heads.output.element_size()
    assert shape.weights == sum(p.numel() * p.element_size() for p in loaded.model.parameters())


def test_the_width_of_the_ffn_is_not_that_of_the_stream(tmp_path: Path) -> None:
    """A config of DistilBERT that leaves `dim` to its class still states `hidden_dim`; `hidden_size` is its alias."""
    folder = two_saved("distilbert", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    width, inner = config.pop("dim"), config["hidden_dim"]
    assert width != inner
    for more in ({}, {"hidden_size": width}):
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        shape = shape_of(inspect_folder(folder), "float32")
        assert (shape.width, shape.inner, shape.heads) == (width, inner, config["n_heads"])
        assert shape.head_width == width // config["n_heads"]


@pytest.mark.parametrize(
    "model_type", ["jamba", "zamba", "rwkv", "lfm2_moe", "mamba", "recurrent_gemma", "bamba", "llama"]
)
def test_channels_of_a_kernel_are_its_heads(model_type: str, tmp_path: Path) -> None:
    """Of Mamba-2 in Bamba a head has several channels."""
    shape = shape_of(inspect_folder(two_saved(model_type, tmp_path)), "float32")
    structure = Session(whole(tmp_path), lambda *_: None, cache=False).structure
    factors = [structure.block(call).factors for call in range(len(structure.calls))]
    alone = [one.heads.heads for one in factors if one is not None and one.heads.output.shape[1] == 1]
    assert shape.channels == max(alone, default=0)
    assert shape.state == (
        structure.stack.config.get_text_config().mamba_d_state if model_type == "jamba" else shape.state
    )
    assert bool(shape.channels) == (model_type not in ("bamba", "llama")) == bool(shape.state)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_blocks_that_are_not_loaded_do_not_count(model_type: str, tmp_path: Path) -> None:
    folder = two_saved(model_type, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    before = shape_of(inspect_folder(folder), "float32")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] - 1}))
    shape, loaded = shape_of(inspect_folder(folder), "float32"), whole(folder)
    assert len(shape.parts.blocks) == len(before.parts.blocks) - 1
    assert shape.weights == sum(p.numel() * p.element_size() for p in loaded.model.parameters()) < before.weights


def test_a_dtype_that_no_model_runs_in_is_refused() -> None:
    files = inspect_folder(demo_path())
    assert shape_of(files, "bf16").element == shape_of(files, "float16").element == 2
    with pytest.raises(InputError, match=r"--dtype 'float8': expected auto, float64, .*, bf16$"):
        shape_of(files, "float8")


def test_experts_count_as_far_as_a_token_is_sent_to_them(tmp_path: Path) -> None:
    model = two_deep(single_model("mixtral"))
    config, layer = model.config, model.model.layers[0]
    shape = shape_of(inspect_folder(two_saved("mixtral", tmp_path)), "float32")
    routed = sum(p.numel() for n, p in layer.named_parameters() if "experts" in n)
    dense = sum(p.numel() for n, p in layer.named_parameters() if "experts" not in n and p.ndim > 1)
    share = config.num_experts_per_tok / config.num_local_experts
    assert shape.products == config.num_hidden_layers * (dense + routed * share)


@pytest.mark.parametrize(("dtype", "named"), [("auto", "bfloat16"), ("fp32", "float32"), ("float64", "float64")])
def test_dtype(dtype: str, named: str) -> None:
    shape = shape_of(inspect_folder(demo_path()), dtype)
    assert shape.dtype == named
    assert shape.weights == shape.element * shape_of(inspect_folder(demo_path()), "float16").weights // 2
