"""An embedder's files: what modules.json names is read, whatever it is called, and nothing outside the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from duat_cli.errors import CheckpointError
from duat_cli.loading.declared.embedder import embedder


def state(folder: Path, **paths: str) -> None:
    """modules.json of these types and paths."""
    (folder / "modules.json").write_text(json.dumps([{"type": f"st.{name}", "path": p} for name, p in paths.items()]))


def settings(place: Path, **fields: object) -> None:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(fields))


def weights(file: Path, values: torch.Tensor, name: str = "a") -> None:
    save_file({"b": torch.ones(2), name: values}, file)


def test_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    settings(tmp_path, model_type="bert")
    assert embedder(tmp_path).fields == {}
    settings(tmp_path / "1_Pooling", pooling_mode="cls")
    assert embedder(tmp_path).fields == {"1_Pooling/config.json.pooling_mode": "cls"}


def test_configs_are_those_that_modules_name(tmp_path: Path) -> None:
    settings(tmp_path, model_type="bert")
    settings(tmp_path / "1_Pooling", pooling_mode="cls")
    settings(tmp_path / "pool", pooling_mode="mean")
    state(tmp_path, Transformer="", Pooling="pool", Normalize="2_Normalize")
    assert embedder(tmp_path).fields == {
        "modules.json.types": ["st.Transformer", "st.Pooling", "st.Normalize"],
        "modules.json.paths": [".", "pool", "2_Normalize"],
        "pool/config.json.pooling_mode": "mean",
    }


def test_weights_are_held_by_their_values(tmp_path: Path) -> None:
    settings(tmp_path / "2_Dense")
    state(tmp_path, Transformer="", Dense="2_Dense")
    file = tmp_path / "2_Dense" / "model.safetensors"

    def digest() -> str:
        return str(embedder(tmp_path).fields["2_Dense.weights"])

    weights(file, torch.tensor([1.0, 2.0]))
    first = digest()
    weights(file, torch.tensor([1.0, 2.0], dtype=torch.float16))
    assert digest() == first
    for other in (torch.tensor([1.0, 3.0]), torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 2.0, 0.0])):
        weights(file, other)
        assert digest() != first
    weights(file, torch.tensor([1.0, 2.0]), name="c")
    assert digest() != first
    assert embedder(tmp_path).nonfinite == {}
    weights(file, torch.tensor([float("nan"), float("inf"), 0.0]))
    assert embedder(tmp_path).nonfinite == {"2_Dense/model.safetensors": 2}
    file.rename(file.with_name("pytorch_model.bin"))  # hashed as a file
    pickle = digest()
    file.with_name("pytorch_model.bin").write_bytes(b"other")
    assert digest() != pickle


@pytest.mark.parametrize("path", ["../other", "/other", "a/../../other", "c:\\other"])
def test_paths_outside_are_refused(path: str, tmp_path: Path) -> None:
    state(tmp_path, Transformer="", Pooling=path)
    with pytest.raises(CheckpointError, match=r"modules\.json: module 1: path: .* lies outside the folder"):
        embedder(tmp_path)


def test_links_outside_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    settings(tmp_path / "other", pooling_mode="cls")
    (folder / "pool").symlink_to(tmp_path / "other")
    state(folder, Transformer="", Pooling="pool")
    with pytest.raises(CheckpointError, match=r"pool/config\.json: is a symlink to .*, outside the folder"):
        embedder(folder)


def test_another_transformer_than_the_folder_s_is_refused(tmp_path: Path) -> None:
    state(tmp_path, Transformer="weights", Pooling="1_Pooling")
    with pytest.raises(CheckpointError, match="the transformer is that of 'weights', and not the one beside"):
        embedder(tmp_path)
    for own in ("", ".", "./"):
        state(tmp_path, Transformer=own)
        assert embedder(tmp_path).fields["modules.json.paths"] == ["."]


def test_entries_without_a_type_or_path(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "st.Transformer"}]')
    with pytest.raises(CheckpointError, match=r"modules\.json: module 0: path: expected a text, got none"):
        embedder(tmp_path)
