"""Integers that a class keeps as such are tables; those in the place of a weight, or in none, may be quantised."""

from __future__ import annotations

import shutil
from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
from transformers import SwinConfig, SwinModel

from duat_cli.analysis.check import integers
from duat_cli.analysis.check.integers import tables
from duat_cli.checks.rules.files import no_floats
from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.zoo import tiny

INDEX = "encoder.layers.0.blocks.0.attention.self.relative_position_index"
QUERY = "encoder.layers.0.blocks.0.attention.self.query.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows, whose index releases of transformers have stored and no longer do."""
    folder = tmp_path_factory.mktemp("swin")
    sizes = {"image_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
    SwinModel(SwinConfig(**sizes)).save_pretrained(folder)
    bad.wedit(folder, lambda s: s.update({INDEX: torch.arange(16).reshape(4, 4)}))
    return folder


def test_an_index_that_the_class_makes_itself_is_no_weight(windows: Path) -> None:
    assert tables(inspect_folder(windows), False) == {INDEX}


@pytest.mark.parametrize(
    ("kind", "mask"),
    [("gpt_neo", "transformer.h.0.attn.attention.bias"), ("gpt_neox", "gpt_neox.layers.0.attention.bias")],
)
def test_a_mask_that_the_class_computes_or_leaves_out_is_no_weight(kind: str, mask: str, tmp_path: Path) -> None:
    tiny.tiny_model(kind).save_pretrained(tmp_path)
    bad.wedit(tmp_path, lambda s: s.update({mask: torch.ones(1, 1, 8, 8, dtype=torch.uint8)}))
    assert tables(inspect_folder(tmp_path), False) == {mask}


def test_integers_in_the_place_of_a_weight_or_of_nothing_are_no_tables(windows: Path, tmp_path: Path) -> None:
    shutil.copytree(windows, tmp_path / "m")
    bad.wedit(tmp_path / "m", lambda s: s.update({QUERY: s[QUERY].to(torch.int64), "q": torch.ones(4, 4).char()}))
    assert tables(inspect_folder(tmp_path / "m"), False) == {INDEX}


def test_integers_that_become_part_of_a_weight_are_no_tables(tmp_path: Path) -> None:
    """Experts that transformers puts together as it loads them."""
    tiny.tiny_model("mixtral").save_pretrained(tmp_path)
    bad.wedit(tmp_path, lambda s: s.update({EXPERT: s[EXPERT].char()}))
    assert tables(inspect_folder(tmp_path), False) == frozenset()


def test_of_a_class_that_cannot_be_built_none_is_known(windows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise CheckpointError("no")

    monkeypatch.setattr("duat_cli.loading.model.load.fit_of", refused)
    assert integers.tables(inspect_folder(windows), False) == frozenset()


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", [NORM, "model.layers.0.self_attn.q_proj.weight"])
def test_a_weight_without_floating_point_numbers_is_a_finding(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.tiny_model("llama").save_pretrained(tmp_path)
    bad.wedit(tmp_path, lambda s: s.update({name: s[name].to(dtype)}))
    files = inspect_folder(tmp_path)
    assert (list(no_floats(files)), tables(files, False)) == ([name], frozenset())


def test_a_mask_of_truth_values_is_no_weight(tmp_path: Path) -> None:
    tiny.tiny_model("gpt_neox").save_pretrained(tmp_path)
    mask = "gpt_neox.layers.0.attention.bias"
    bad.wedit(tmp_path, lambda s: s.update({mask: torch.ones(1, 1, 8, 8, dtype=torch.bool)}))
    assert not no_floats(inspect_folder(tmp_path))
