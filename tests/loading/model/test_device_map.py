"""Which device keeps which weights: a map of a file, checked, or accelerate's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import infer_auto_device_map
from paging import saved

from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.device_map import DISK, DeviceMap, Placed
from duat_cli.loading.model.load import load_files, skeleton

ROOM = {"cpu": float(1 << 40)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """Without memory; three blocks."""
    return skeleton(inspect_folder(folder))


def written(tmp_path: Path, content: object) -> str:
    file = tmp_path / "map.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def placed_names(devices: DeviceMap, model: Any, room: Mapping[str, float]) -> dict[str, str]:
    home = devices.homes(model, room, torch.float32)
    return {name: home(name) for name, _ in model.named_parameters()}


def test_the_nearest_name_of_a_file_decides(model: Any, tmp_path: Path) -> None:
    places = {"": DISK, "model.layers.1": "cpu", "model.layers.1.mlp": DISK, "model.layers.2.mlp.up_proj.weight": "cpu"}
    found = placed_names(DeviceMap.of(written(tmp_path, places)), model, ROOM)
    for name, device in found.items():
        inside = name.startswith("model.layers.1.") and not name.startswith("model.layers.1.mlp.")
        assert device == ("cpu" if inside or name == "model.layers.2.mlp.up_proj.weight" else DISK), name
    assert set(found.values()) == {"cpu", DISK}


@pytest.mark.parametrize("given", ["auto", "balanced", "sequential"])
def test_what_fits_nowhere_goes_to_disk_and_a_block_is_not_split(given: str, model: Any) -> None:
    """Over two GPUs and the machine's memory, each of which has room for a little more than a block."""
    block = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    rest = sum(p.numel() * 4 for p in model.parameters()) - 3 * block
    room = {"cuda:0": rest + 1.5 * block, "cuda:1": 2.2 * block, "cpu": 1.5 * block}
    found = placed_names(DeviceMap.of(given), model, room)
    for layer in range(3):
        assert len({device for name, device in found.items() if name.startswith(f"model.layers.{layer}.")}) == 1
    sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
    for device, left in room.items():
        assert sum(sizes[name] for name, place in found.items() if place == device) <= left
    assert "cuda:0" in found.values()
    assert len(set(found.values())) > 1
    nowhere = placed_names(DeviceMap.of(given), model, {"cpu": 1.5 * block})
    assert DISK in nowhere.values()


def test_a_sequential_map_is_accelerates(model: Any) -> None:
    whole = sum(p.numel() * 4 for p in model.parameters())
    theirs = infer_auto_device_map(model, {"cpu": whole // 2}, no_split_module_classes=["LlamaDecoderLayer"])
    ours = DeviceMap.of("sequential").homes(model, {"cpu": whole // 2}, torch.float32)
    for name, place in theirs.items():
        for parameter, _ in model.named_parameters():
            if parameter.startswith(f"{name}."):
                assert ours(parameter) == place


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"": "meta"}, "'': device 'meta': not usable here"),
        ({"model.layers.0": "cuda:63"}, "'model.layers.0': device 'cuda:63': not usable here"),
        ({"model.layers.0": 63}, "'model.layers.0': device '63': not usable here"),
        ({"": "toaster"}, "'': device 'toaster': not usable here"),
        ([], "expected an object of module names and devices"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_file_that_is_no_map_and_a_device_that_is_not_there(content: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--device-map .*map\.json: ") as caught:
        DeviceMap.of(written(tmp_path, content))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_the_machines_memory_is_one_device(device: str, model: Any, tmp_path: Path) -> None:
    assert set(placed_names(DeviceMap.of(written(tmp_path, {"": device})), model, ROOM).values()) == {"cpu"}


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected auto, balanced, sequential, or a file; no such file"):
        DeviceMap.of(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.2": "cpu", "model.norm": "cpu",
             "lm_head": "cpu"},
            """says nothing of 'model.layers.1'; add it, or "" for all that is not named""",
        ),
        ({"": "cpu", "model.layer.0": "cpu"}, "'model.layer.0': no module of LlamaForCausalLM"),
    ],
)  # fmt: skip
def test_a_map_of_another_model(content: dict[str, str], said: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        placed_names(DeviceMap.of(written(tmp_path, content)), model, ROOM)
    assert said in str(caught.value)


def test_more_than_there_is_room_for(folder: Path, tmp_path: Path) -> None:
    files, asked = inspect_folder(folder), DeviceMap.of(written(tmp_path, {"": "cpu"}))
    said = "cpu is to keep 0.00 GiB of weights, has 0.00 GiB beside the run; place some on disk"
    with pytest.raises(InputError, match=said):
        load_files(Source(folder, "tiny", None), files, paged=True, placed=Placed(asked, {"cpu": 100.0}))
